# frozen_string_literal: true

require_relative "console"

module Setup
  # Runs jobs side by side in threads. A job takes some of a number of slots, and starts as soon as these are free; of
  # jobs that wait, the first that fits goes first. What a job prints is shown when it is over, as one piece; a single job's at once.
  class Pool
    Job = Struct.new(:name, :slots, :work, keyword_init: true)

    # @param slots [Integer]
    def initialize(slots)
      @slots = slots
      @waiting = []
      @running = {}
      @over = []
      @mutex = Mutex.new
      @changed = ConditionVariable.new
    end

    # @param slots [Integer] one that asks for more than there are runs alone
    def add(name, slots, &work)
      @waiting << Job.new(name: name, slots: [slots, @slots].min, work: work)
    end

    # Runs all jobs; when this thread is interrupted or a job raises, the others are ended.
    #
    # @raise what a job has raised
    def run
      return @waiting.shift.work.call if @waiting.size == 1

      @mutex.synchronize do
        until @waiting.empty? && @running.empty?
          start_those_that_fit
          @changed.wait(@mutex, Console::HEARTBEAT) if @over.empty?
          Console.say "  still at it: #{@running.each_value.map(&:name).join(", ")}" if @over.empty?
          conclude(@over.shift) until @over.empty?
        end
      end
    ensure
      @running.each_key(&:kill)
      @running.each_key(&:join)
    end

    private

    def start_those_that_fit
      @waiting.reject! do |job|
        next if job.slots > @slots - @running.each_value.sum(&:slots)

        @running[start(job)] = job
      end
    end

    def start(job)
      Thread.new do
        Thread.current.report_on_exception = false
        Thread.current[:started] = Console.now
        Console.captured(&job.work)
      ensure
        @mutex.synchronize do
          @over << Thread.current
          @changed.signal
        end
      end
    end

    def conclude(thread)
      text = thread.value
      job = @running.delete(thread)
      Console.say text, "== #{job.name}: over after #{Console.duration(Console.now - thread[:started])}"
    end
  end
end
