# frozen_string_literal: true

require "etc"
require_relative "console"
require_relative "gems"
require_relative "native"
require_relative "pool"
require_relative "summary"

module Setup
  # The legs of the tests: each runs one runner, shows its output, and records its counts. Legs that were queued run side
  # by side, as far as the slots allow.
  class Tests
    # Ranks that share two cores must not bring a pool of threads each; and what runs beside other tests takes longer.
    ENVIRONMENT = {"OMP_NUM_THREADS" => "1", "OPENBLAS_NUM_THREADS" => "1",
                   "TDDP_TEST_TIMEOUT_MULTIPLIER" => ENV.fetch("TDDP_TEST_TIMEOUT_MULTIPLIER", "3")}.freeze

    # Seconds of a leg. It ends one that hangs, whose tests have limits of their own; a slow machine is far from it.
    LIMIT = 2400

    # Tests that run at a time, on all legs: most of them wait.
    def self.slots
      Integer(ENV["TDDP_TEST_SLOTS"].to_s.empty? ? 3 * Etc.nprocessors : ENV["TDDP_TEST_SLOTS"])
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
      @pool.add(name, slots) { attempt(name, &block) }
    end

    # @param folder [String] a build folder of CMake
    # @param jobs [Integer] programs run at a time
    # @param only [Array<String>] options of ctest that choose among the tests
    def ctest(leg, folder, env: {}, wrapper: [], jobs: 1, only: [])
      run(leg, :ctest, *wrapper, "ctest", "--test-dir", folder, "--output-on-failure", "--timeout", "1800", "--parallel", jobs.to_s,
        *only, env: ENVIRONMENT.merge(env))
    end

    # @param patterns [Array<String>] files of minitest
    # @param jobs [Integer] processes that run a file each at a time; 1: all files run in one process
    # @param preload [String, nil] what is required once for all of these processes
    def minitest(leg, *patterns, env: {}, jobs: 1, preload: nil)
      files = Dir.glob(patterns, base: ROOT).sort
      return skip(leg, "there is no #{patterns.join(", ")}") if files.empty?

      options = (jobs > 1) ? ["--jobs", jobs.to_s, *(preload && ["--require", preload])] : []
      run(leg, :minitest, *Gems.exec(RbConfig.ruby, "-Ilib", "-Itest", "test/run.rb", *options, *files),
        env: ENVIRONMENT.merge(env))
    end

    # A check that is no test runner's: one pass or one failure.
    #
    # @param optional [Boolean] one that takes too long counts as not run
    # @return [Boolean] whether it passed
    def check(leg, optional: false)
      started = Console.now
      yield
      finish(leg, {passed: 1, failed: 0, skipped: 0}, started, clean: true)
    rescue Failure => e
      return skip(leg, "not run to its end: #{e.message.lines.first.chomp}") if optional && e.is_a?(TooLong)

      Console.say(e.message)
      finish(leg, {passed: 0, failed: 1, skipped: 0}, started, clean: false, report: e.message)
    end

    def skip(leg, reason)
      Console.say "#{leg}: skipped, #{reason}"
      @results << Summary.record(leg, {passed: 0, failed: 0, skipped: 1}, 0, reason: reason)
      false
    end

    # Takes over what another run of these legs recorded in a file.
    #
    # @param status [Process::Status, nil] how it ended; nil: not within `limit` seconds, so what it did not record was not run
    # @return [Boolean] whether all of it was run and passed
    def adopt(prefix, path, started, status:, limit:)
      inner = Summary.read(path)
      inner.each do |result|
        counts = result.to_h.slice(:passed, :failed, :skipped)
        @results << Summary.record("#{prefix}/#{result.leg}", counts, result.seconds, report: result.report, reason: result.reason,
          skips: result.skips)
      end
      failed = inner.any? { |result| result.failed.positive? }
      if status.nil?
        skip(prefix, "not run to its end within #{Console.duration(limit)}")
      elsif !status.success? && !failed
        finish(prefix, {passed: 0, failed: 1, skipped: 0}, started, clean: false)
      end
      !failed && status&.success? || false
    end

    # @return [Boolean] whether a leg so far has failed
    def failed?(leg = nil)
      @results.any? { |result| result.failed.positive? && (leg.nil? || result.leg.start_with?(leg)) }
    end

    # Runs the legs that were queued and ends the rake task with what all found.
    def close
      @pool.run
      sums = Summary.total(@results)
      Console.say "", Summary.table(@results), Summary.skipped(@results)
      raise Failure, "#{sums[:failed]} failed; their output is above and in build/log" if sums[:failed].positive?
    end

    private

    def attempt(name)
      started = Console.now
      yield
    rescue Failure => e
      Console.say(e.message)
      finish(name, {passed: 0, failed: 1, skipped: 0}, started, clean: false, report: e.message)
    end

    def run(leg, parser, *command, env:)
      Console.say "== #{leg}"
      started = Console.now
      status, output = Console.tee(*command, log: "test-#{leg.tr("/", "-")}", env: env, limit: LIMIT)
      counts = Summary.public_send(parser, output)
      clean = status&.success? && counts.values.sum.positive?
      finish(leg, counts, started, clean: clean, report: late(status) + Summary.failures(output), skips: Summary.skips(output))
    end

    def late(status)
      status ? "" : "it was not over within #{Console.duration(LIMIT)}, and was ended\n"
    end

    def finish(leg, counts, started, clean:, report: nil, skips: nil)
      result = Summary.record(leg, counts, Console.now - started, clean: clean, report: report, skips: skips)
      @results << result
      result.failed.zero?
    end
  end
end
