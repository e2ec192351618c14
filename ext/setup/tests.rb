# frozen_string_literal: true

require_relative "console"
require_relative "gems"
require_relative "native"
require_relative "summary"

module Setup
  # The legs of the tests: each runs one runner, shows its output, and records its counts.
  class Tests
    # Ranks that share two cores must not bring a pool of threads each.
    THREADS = {"OMP_NUM_THREADS" => "1", "OPENBLAS_NUM_THREADS" => "1"}.freeze

    def initialize
      @results = []
    end

    # @param folder [String] a build folder of CMake
    # @param jobs [Integer] programs run at a time; those under sanitizers need the machine for themselves
    # @param only [Array<String>] options of ctest that choose among the tests
    def ctest(leg, folder, env: {}, wrapper: [], limit: 900, jobs: 1, only: [])
      run(leg, :ctest, *wrapper, "ctest", "--test-dir", folder, "--output-on-failure", "--timeout", "300", "--parallel", jobs.to_s,
        *only, env: THREADS.merge(env), limit: limit)
    end

    # @param patterns [Array<String>] files of minitest, all run in one process
    def minitest(leg, *patterns, env: {}, limit: 900)
      files = Dir.glob(patterns, base: ROOT).sort
      return skip(leg, "there is no #{patterns.join(", ")}") if files.empty?

      run(leg, :minitest, *Gems.exec(RbConfig.ruby, "-Ilib", "-Itest", "test/run.rb", *files), env: THREADS.merge(env), limit: limit)
    end

    # A check that is no test runner's: one pass or one failure.
    def check(leg)
      started = Console.now
      yield
      finish(leg, {passed: 1, failed: 0, skipped: 0}, started, clean: true)
    rescue Failure => e
      Console.say(e.message)
      finish(leg, {passed: 0, failed: 1, skipped: 0}, started, clean: false, report: e.message)
    end

    def skip(leg, reason)
      Console.say "#{leg}: skipped, #{reason}"
      @results << Summary.record(leg, {passed: 0, failed: 0, skipped: 1}, 0, reason: reason)
    end

    # Takes over what another run of these legs recorded in a file.
    def adopt(prefix, path, started, clean:)
      inner = Summary.read(path)
      inner.each do |result|
        counts = result.to_h.slice(:passed, :failed, :skipped)
        @results << Summary.record("#{prefix}/#{result.leg}", counts, result.seconds, report: result.report, reason: result.reason)
      end
      return if clean || inner.any? { |result| result.failed.positive? }

      finish(prefix, {passed: 0, failed: 1, skipped: 0}, started, clean: false)
    end

    # @return [Boolean] whether a leg so far has failed
    def failed?
      @results.any? { |result| result.failed.positive? }
    end

    # Ends the rake task with what its legs found.
    def close
      sums = Summary.total(@results)
      Console.say "", Summary.table(@results)
      raise Failure, "#{sums[:failed]} failed; their output is above and in build/log" if sums[:failed].positive?
    end

    private

    def run(leg, parser, *command, env:, limit:)
      Console.say "== #{leg}"
      started = Console.now
      status, output = Console.tee(*command, log: "test-#{leg.tr("/", "-")}", env: env, limit: limit)
      counts = Summary.public_send(parser, output)
      clean = status&.success? && counts.values.sum.positive?
      finish(leg, counts, started, clean: clean, report: Summary.failures(output))
    end

    def finish(leg, counts, started, clean:, report: nil)
      @results << Summary.record(leg, counts, Console.now - started, clean: clean, report: report)
    end
  end
end
