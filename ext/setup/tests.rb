# frozen_string_literal: true

require_relative "gems"
require_relative "summary"

module Setup
  # Runs jobs in parallel threads. A job takes some of a number of slots, and starts as soon as these are free; of the
  # waiting jobs the first that fits goes first. The output of a job is shown in one piece when it ends; a single job's at once.
  class Pool
    Job = Struct.new(:name, :slots, :work, :started)

    # @param slots [Integer]
    def initialize(slots)
      @slots = slots
      @waiting = []
      @running = {}
    end

    # @param slots [Integer] a job that asks for more than there are runs alone
    def add(name, slots, &work)
      @waiting << Job.new(name, [slots, @slots].min, work)
    end

    # Runs all jobs. When this thread is interrupted or a job raises, the others are ended.
    #
    # @raise what a job has raised
    def run
      return @waiting.shift.work.call if @waiting.size == 1

      heard = Console.now
      until @waiting.empty? && @running.empty?
        start_those_that_fit
        sleep 0.02
        finished = @running.keys.reject(&:alive?).each { |thread| finish(thread) }
        heard = Console.now if finished.any?
        next if Console.now - heard < Console::HEARTBEAT

        heard = Console.now
        Console.say "  still running: #{@running.each_value.map(&:name).join(", ")}"
      end
    ensure
      @running.each_key(&:kill)
      @running.each_key(&:join)
    end

    private

    def start_those_that_fit
      @waiting.reject! do |job|
        next if job.slots > @slots - @running.each_value.sum(&:slots)

        job.started = Console.now
        thread = Thread.new do
          Thread.current.report_on_exception = false
          Console.captured(&job.work)
        end
        @running[thread] = job
      end
    end

    def finish(thread)
      text = thread.value
      job = @running.delete(thread)
      Console.say text, "== #{job.name}: over after #{Console.duration(Console.now - job.started)}"
    end
  end

  # Runs the legs of the tests: each starts one runner, shows its output, and records its counts. Legs run in parallel, as far as
  # the slots allow.
  class Tests
    # Ranks that share two cores must not start a pool of threads each, and tests take longer beside other tests.
    ENVIRONMENT = {"OMP_NUM_THREADS" => "1", "OPENBLAS_NUM_THREADS" => "1",
                   "TDDP_TEST_TIMEOUT_MULTIPLIER" => ENV.fetch("TDDP_TEST_TIMEOUT_MULTIPLIER", "3")}.freeze

    # Seconds of a leg, far more than a slow machine needs: it ends a leg that hangs, whose tests have limits of their own.
    LIMIT = 2400

    # Tests that run at a time in all legs together: most of them wait.
    def self.slots
      Integer(ENV["TDDP_TEST_SLOTS"].to_s.empty? ? 3 * Etc.nprocessors : ENV["TDDP_TEST_SLOTS"])
    end

    # Runs the legs that the block queues.
    #
    # @raise [Failure] if a test failed
    def self.run
      tests = new
      yield tests
      tests.close
    end

    def initialize(slots: Tests.slots)
      @results = []
      @pool = Pool.new(slots)
    end

    # Queues a leg for {#close}.
    #
    # @param slots [Integer] tests that the block runs at a time
    # @yield runs the leg by the methods below; a {Failure} counts as a failed test
    def leg(name, slots: 1, &block)
      @pool.add(name, slots) { guard(name, &block) }
    end

    # @param folder [String] a build folder of CMake
    # @param jobs [Integer] programs run at a time
    # @param only [Array<String>] options of ctest that choose among the tests
    # @return [Boolean] whether all passed, here and below
    def ctest(leg, folder, env: {}, wrapper: [], jobs: 1, only: [])
      run(leg, :ctest, *wrapper, "ctest", "--test-dir", folder, "--output-on-failure", "--timeout", "1800", "--parallel", jobs.to_s,
        *only, env: env)
    end

    # @param patterns [Array<String>] files of minitest
    # @param jobs [Integer] processes that run a file each at a time; 1: all files run in one process
    # @param preload [String, nil] what is required once for all of these processes
    def minitest(leg, *patterns, env: {}, jobs: 1, preload: nil)
      files = Dir.glob(patterns, base: ROOT).sort
      return skip(leg, "there is no #{patterns.join(", ")}") if files.empty?

      options = (jobs > 1) ? ["--jobs", jobs.to_s, *(preload && ["--require", preload])] : []
      run(leg, :minitest, *Gems.exec(RbConfig.ruby, "-Ilib", "-Itest", "test/run.rb", *options, *files), env: env)
    end

    # Runs a check without a test runner: one pass or one failure.
    #
    # @param optional [Boolean] whether a check that takes too long counts as not run
    def check(leg, optional: false)
      guard(leg, optional: optional) do |started|
        yield
        finish(leg, {passed: 1}, started)
      end
    end

    # Runs the block, which returns whether all passed, unless it has passed with these files and settings before.
    def unless_unchanged(leg, patterns, *settings)
      unchanged = Unchanged.new(leg, patterns, *settings)
      if (reason = unchanged.reason)
        skip(leg, reason)
      elsif yield
        unchanged.passed!
      end
    end

    # @return [false]
    def skip(leg, reason)
      Console.say "#{leg}: skipped, #{reason}"
      @results << Summary.record(leg, {skipped: 1}, 0, reason: reason)
      false
    end

    # Takes over what another run of these legs recorded in a file.
    #
    # @param status [Process::Status, nil] how it ended; nil: not within `limit` seconds, so legs that it did not record count as not run
    def adopt(prefix, path, status, limit)
      results = Summary.read(path).each do |result|
        result.leg = "#{prefix}/#{result.leg}"
        @results << Summary.append(result)
      end
      return skip(prefix, "not run to its end within #{Console.duration(limit)}") unless status
      return false if results.any? { |result| result.failed.positive? }

      status.success? || finish(prefix, {failed: 1}, Console.now)
    end

    # @return [Boolean] whether a test so far has failed
    def failed?
      @results.any? { |result| result.failed.positive? }
    end

    # Runs the legs that were queued, and prints the sums.
    #
    # @raise [Failure] if a test failed
    def close
      @pool.run
      Console.say "", Summary.table(@results), Summary.skipped(@results)
      raise Failure, "#{Summary.total(@results)[:failed]} failed; their output is above and in build/log" if failed?
    end

    private

    def guard(leg, optional: false)
      yield started = Console.now
    rescue Failure => e
      return skip(leg, "not run to its end: #{e.message.lines.first.chomp}") if optional && e.is_a?(TooLong)

      Console.say(e.message)
      finish(leg, {failed: 1}, started, report: e.message)
    end

    def run(leg, parser, *command, env:)
      Console.say "== #{leg}"
      started = Console.now
      status, output = Console.run(*command, log: "test-#{leg.tr("/", "-")}", env: ENVIRONMENT.merge(env), limit: LIMIT, show: true)
      counts = Summary.public_send(parser, output)
      late = status ? "" : "it did not end within #{Console.duration(LIMIT)}, and was ended\n"
      finish(leg, counts, started, clean: status&.success? && counts.values.sum.positive?, report: late + Summary.failures(output),
        skips: Summary.skips(output))
    end

    def finish(leg, counts, started, **outcome)
      result = Summary.record(leg, counts, Console.now - started, **outcome)
      @results << result
      result.failed.zero?
    end
  end
end
