# frozen_string_literal: true

require "json"

module Setup
  # Counts of tests: read from the test runners' own closing lines, kept for each leg, added up at the end.
  #
  # Results are lines of JSON in the file that TDDP_RESULTS names. As a program it ends a CI run:
  #
  #   ruby ext/setup/summary.rb RESULTS
  module Summary
    # One leg's outcome. The report is what the runner printed about its failures; nil if nothing failed. The reason is why the
    # leg as a whole was skipped; skips has the reasons of its tests, each with the number of tests.
    Result = Struct.new(:leg, :passed, :failed, :skipped, :seconds, :report, :reason, :skips, keyword_init: true)

    NOTHING = {passed: 0, failed: 0, skipped: 0}.freeze

    # Lines of a report.
    REPORT = 60

    SKIPPED = '\*{3}(?:Skipped|Not Run \(Disabled)'

    module_function

    # @param output [String] what ctest printed
    # @return [Hash] :passed, :failed, :skipped
    def ctest(output)
      outcomes = output.scan(%r{^\s*\d+/\d+ Test\s+#\d+: .*?(Passed|\*{3}[A-Z].*)}).flatten.map do |word|
        next :passed if word == "Passed"

        word.match?(/\A#{SKIPPED}/o) ? :skipped : :failed
      end
      NOTHING.merge(outcomes.tally)
    end

    # @param output [String] what minitest printed
    # @return [Hash] :passed, :failed, :skipped
    def minitest(output)
      counts = output.scan(/^(\d+) runs, \d+ assertions, (\d+) failures, (\d+) errors, (\d+) skips/).map { |numbers| numbers.map(&:to_i) }
      runs, failures, errors, skips = [[0, 0, 0, 0], *counts].transpose.map(&:sum)
      {passed: runs - failures - errors - skips, failed: failures + errors, skipped: skips}
    end

    # @param output [String] what a runner of either kind printed
    # @return [String] its own list of failures, or its last lines if it made none
    def failures(output)
      lines = output.lines
      first = lines.index { |line| line.match?(/\A  1\) \w+:|\AThe following tests FAILED:/) } || [lines.size - REPORT, 0].max
      lines[first, REPORT].join
    end

    # @param output [String] what a runner of either kind printed
    # @return [Hash{String => Integer}] why tests were skipped, and how many for each reason; ctest names only the tests
    def skips(output)
      of_minitest = output.scan(/^skipped: \S+#\S+: (.+)$/)
      of_ctest = output.scan(%r{^\s*\d+/\d+ Test\s+#\d+: (\S+) .*#{SKIPPED}}o)
      (of_minitest + of_ctest).flatten.tally
    end

    # Writes one leg's counts where CI adds them up.
    #
    # @param clean [Boolean] whether the runner itself succeeded; one that did not and counts no failure counts as one
    # @param report [String, nil] for a leg that failed
    # @param reason [String, nil] for a leg that was skipped
    # @param skips [Hash{String => Integer}] for a leg of which tests were skipped
    # @return [Result]
    def record(leg, counts, seconds, clean: true, report: nil, reason: nil, skips: {})
      counts = NOTHING.merge(counts)
      counts[:failed] = 1 if !clean && counts[:failed].zero?
      report = nil if counts[:failed].zero?
      append(Result.new(leg: leg, seconds: seconds.round(1), report: report, reason: reason, skips: skips, **counts))
    end

    def append(result)
      File.write(ENV["TDDP_RESULTS"], "#{JSON.generate(result.to_h)}\n", mode: "a") if ENV["TDDP_RESULTS"]
      result
    end

    # @param path [String]
    # @return [Array<Result>]
    def read(path)
      return [] unless File.file?(path)

      File.readlines(path).map { |line| Result.new(**JSON.parse(line, symbolize_names: true)) }
    end

    # @param results [Array<Result>]
    # @return [Hash] the sums
    def total(results)
      NOTHING.to_h { |name, _| [name, results.sum { |result| result[name] }] }
    end

    # @return [String] one line a leg
    def table(results)
      results.map { |result|
        line = format("  %-24s passed %4d   failed %3d   skipped %3d   %7.1f s", *result.to_h.values_at(:leg, :passed, :failed, :skipped, :seconds))
        result.reason ? "#{line}   (#{result.reason})" : line
      }.join("\n")
    end

    # @return [String] the reports of the legs that failed, for the end of a long log
    def reports(results)
      results.select { |result| result.failed.positive? }.map { |result| "!! #{result.leg}\n#{result.report}\n" }.join
    end

    # @return [String] what was not tested, leg by leg; empty if everything was
    def skipped(results)
      lines = results.flat_map do |result|
        tests = (result.skips || {}).map { |reason, count| "  #{result.leg}: #{count} of its tests: #{reason}\n" }
        result.reason ? ["  #{result.leg}: all of it: #{result.reason}\n", *tests] : tests
      end
      lines.empty? ? "" : "skipped:\n#{lines.join}"
    end

    def closing_line(sums)
      "#{sums[:passed]} passed, #{sums[:failed]} failed, #{sums[:skipped]} skipped"
    end
  end
end

if $0 == __FILE__
  results = Setup::Summary.read(ARGV.fetch(0))
  sums = Setup::Summary.total(results)
  puts Setup::Summary.reports(results), Setup::Summary.table(results), "", Setup::Summary.skipped(results), Setup::Summary.closing_line(sums)
  exit(sums[:failed].zero? && sums[:passed].positive?)
end
