# frozen_string_literal: true

require "fileutils"
require "io/wait"
require "json"
require "tmpdir"

module Collectives
  # The processes of one partner. They sleep at FIFOs of their own until they are told to measure; rank 0 answers
  # through another. All live in a folder that goes with them.
  class Job
    # The partner cannot be started, has ended, or does not answer.
    class Failed < StandardError; end

    START_LIMIT = 60
    LIMIT = 60
    PATIENCE = 5 # beyond the limit that the ranks keep themselves
    LEAVE_LIMIT = 3
    MEETING_BYTES = 64 * 64 + 64 * 4096 * 8 # meeting.h

    # @return [String] of what is measured, as the partner says
    attr_reader :version

    # @param partner [Partner]
    # @param ranks [Integer]
    # @param bind [Boolean] whether each rank's thread is bound to a core
    # @param hosts [Hosts, nil] where the ranks run; nil: all here
    def initialize(partner, ranks, bind: false, hosts: nil)
      @bind = bind
      @hosts = hosts
      @partner = partner
      @ranks = ranks
      @pids = []
      @folder = Dir.mktmpdir("collectives")
      @name = File.basename(@folder).delete("^A-Za-z0-9")
      prepare
      partner.commands(ranks, hosts).each { |rank, command| spawn_rank(rank, command) }
      @version = answer(START_LIMIT).fetch("version")
    ensure
      # Also when a signal ends it halfway.
      close unless @version
    end

    # @param iterations [Integer] timed calls at most
    # @param microseconds [Float] about how long they may take
    # @return [Hash] the answer's, or {"skip" => reason}
    def measure(operation, dtype, bytes, iterations, microseconds, memory, fresh:, check:)
      line = [operation, dtype, bytes, iterations, microseconds.round, memory, fresh ? "fresh" : "settled", check ? "check" : "trust"].join(" ")
      @requests.each { |request| request.puts(line) }
      answer(LIMIT + PATIENCE)
    end

    # Ends the processes, those that do not go by force, and removes what they shared.
    def close
      [*@requests, @answers].compact.each { |file| file.close unless file.closed? }
      leave
      # What a partner named itself and could not remove any more.
      FileUtils.rm_f(Dir["/dev/shm/*#{@name}*"]) unless @name.to_s.empty?
      FileUtils.rm_rf(@folder)
    end

    private

    def prepare
      paths = ["answers", *Array.new(@ranks) { |rank| "requests.#{rank}" }].map { |name| File.join(@folder, name) }
      paths.each { |path| File.mkfifo(path, 0o600) }
      # Open for both directions, neither end waits for the other to come; when this process ends, ranks read the end.
      @answers, *@requests = paths.map { |path| File.open(path, "r+").tap { |file| file.sync = true } }
      File.write(File.join(@folder, "meeting"), "")
      File.truncate(File.join(@folder, "meeting"), MEETING_BYTES)
    end

    def spawn_rank(rank, command)
      environment = {"RANK" => rank.to_s, "WORLD_SIZE" => @ranks.to_s, "BENCH_FOLDER" => @folder, "BENCH_LIMIT" => LIMIT.to_s,
                     "BENCH_BIND" => @bind ? "1" : "0", "BENCH_NAME" => @name, "TMPDIR" => @folder, "OMP_NUM_THREADS" => "1", "OPENBLAS_NUM_THREADS" => "1",
                     "GLOO_SOCKET_IFNAME" => @hosts ? "eth0" : "lo"}
      log = File.join(@folder, "log")
      # A group of their own: the terminal's Ctrl-C is this process's to handle.
      options = {in: File::NULL, out: [log, "a"], err: [log, "a"], pgroup: @pids.first || 0}
      place = @hosts ? @hosts.command(@hosts.of(rank, @ranks)) : []
      @pids << spawn(environment.merge(@partner.environment), *place, *command, options)
    end

    def answer(limit)
      deadline = now + limit
      until @answers.wait_readable(0.1)
        raise Failed, "it ended: #{last_words}" if @pids.any? { |pid| ended?(pid) } && !@answers.wait_readable(0)
        raise Failed, "no answer within #{limit} s: #{last_words}" if now > deadline
      end
      JSON.parse(@answers.gets)
    end

    def last_words
      lines = File.exist?(File.join(@folder, "log")) ? File.read(File.join(@folder, "log")).scrub.lines.map(&:strip).reject(&:empty?) : []
      # Several ranks often say the same; mpirun draws lines around what it says; below an error's line comes where it was.
      errors = lines.grep(/error|failed/i).first(2)
      (errors.empty? ? lines.grep(/\p{Alnum}/).last(3) : errors).uniq.join(" / ").then { |text| text.empty? ? "it said nothing" : text[0, 400] }
    end

    def leave
      gone = within(LEAVE_LIMIT)
      %w[TERM KILL].each do |signal|
        break if gone

        signal_all(signal)
        gone = within(LEAVE_LIMIT)
      end
      # Children of the ranks, of which one may have been missed.
      signal_all("KILL")
    end

    def within(limit)
      deadline = now + limit
      sleep 0.01 until (gone = @pids.all? { |pid| ended?(pid) }) || now > deadline
      gone
    end

    def signal_all(name)
      Process.kill(name, -@pids.first) unless @pids.empty?
    rescue Errno::ESRCH, Errno::EPERM
      nil
    end

    def ended?(pid)
      @ended ||= {}
      @ended[pid] ||= Process.wait(pid, Process::WNOHANG) ? true : false
    rescue Errno::ECHILD
      @ended[pid] = true
    end

    def now
      Process.clock_gettime(Process::CLOCK_MONOTONIC)
    end
  end
end
