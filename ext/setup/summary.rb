# frozen_string_literal: true

require "json"

module Setup
  # Counts of tests: read from the test runners' own closing lines, kept for each leg, added up at the end.
  #
  # Results are lines of JSON in the file that TDDP_RESULTS names. As a program it closes a CI run:
  #
  #   ruby ext/setup/summary.rb RESULTS
  module Summary
    # One leg's outcome. A leg that ended badly without a failed test counts as one failure. The report is what
    # the runner said of its failures; nil where nothing failed. The reason is why the leg as a whole was skipped;
    # skips has the reasons of its tests, each with the number of tests.
    Result = Struct.new(:leg, :passed, :failed, :skipped, :seconds, :report, :reason, :skips, keyword_init: true)

    # What a report keeps, in lines.
    REPORT = 60

    module_function

    # @param output [String] what ctest printed
    # @return [Hash] :passed, :failed, :skipped
    def ctest(output)
      counts = {passed: 0, failed: 0, skipped: 0}
      output.each_line do |line|
        next unless line =~ %r{\A\s*\d+/\d+ Test\s+#\d+: .*?(Passed|\*{3}[A-Z]\w+(?: Run \(Disabled)?)}

        counts[outcome($1)] += 1
      end
      counts
    end

    # @param output [String] what minitest printed
    def minitest(output)
      counts = {passed: 0, failed: 0, skipped: 0}
      output.scan(/^(\d+) runs, \d+ assertions, (\d+) failures, (\d+) errors, (\d+) skips/) do |numbers|
        runs, failures, errors, skips = numbers.map(&:to_i)
        counts[:passed] += runs - failures - errors - skips
        counts[:failed] += failures + errors
        counts[:skipped] += skips
      end
      counts
    end

    # @param output [String] what a runner of either kind printed
    # @return [String] its own list of failures, or its last lines where it made none
    def failures(output)
      lines = output.lines
      first = lines.index { |line| line.match?(/\A  1\) \w+:|\AThe following tests FAILED:/) } || [lines.size - REPORT, 0].max
      lines[first, REPORT].join
    end

    # @param output [String] what a runner of either kind printed
    # @return [Hash{String => Integer}] why tests were skipped, and how many for each reason; ctest names the tests alone
    def skips(output)
      of_minitest = output.scan(/^skipped: \S+#\S+: (.+)$/).flatten
      of_ctest = output.scan(%r{^\s*\d+/\d+ Test\s+#\d+: (\S+) .*\*{3}(?:Skipped|Not Run \(Disabled)}).flatten
      (of_minitest + of_ctest).tally
    end

    # Writes one leg's counts where CI adds them up.
    #
    # @param clean [Boolean] whether the runner itself ended with success
    # @param report [String, nil] for a leg that failed
    # @param reason [String, nil] for a leg that was skipped
    # @param skips [Hash{String => Integer}, nil] for a leg of which tests were skipped
    def record(leg, counts, seconds, clean: true, report: nil, reason: nil, skips: nil)
      counts = counts.merge(failed: 1) if !clean && counts[:failed].zero?
      report = nil if counts[:failed].zero?
      result = Result.new(leg: leg, seconds: seconds.round(1), report: report, reason: reason, skips: skips || {}, **counts)
      append(result) if ENV["TDDP_RESULTS"]
      result
    end

    def append(result)
      File.open(ENV.fetch("TDDP_RESULTS"), "a") { |file| file.puts(JSON.generate(result.to_h)) }
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
      %i[passed failed skipped].to_h { |name| [name, results.sum { |result| result[name] }] }
    end

    # @return [String] one line a leg
    def table(results)
      results.map { |result|
        line = format("  %-24s passed %4d   failed %3d   skipped %3d   %7.1f s", *result.to_h.values_at(:leg, :passed, :failed, :skipped, :seconds))
        result.reason ? "#{line}   (#{result.reason})" : line
      }.join("\n")
    end

    # @return [String] what the legs that failed said of it, so that the end of a long log tells why it is red
    def reports(results)
      results.reject { |result| result.failed.zero? }.map { |result| "!! #{result.leg}\n#{result.report}\n" }.join
    end

    # @return [String] what was not tested, leg by leg; empty where everything was
    def skipped(results)
      lines = results.flat_map do |result|
        tests = (result.skips || {}).map { |reason, count| "#{result.leg}: #{count} of its tests: #{reason}" }
        result.reason ? ["#{result.leg}: all of it: #{result.reason}", *tests] : tests
      end
      lines.empty? ? "" : "skipped:\n#{lines.map { |line| "  #{line}\n" }.join}"
    end

    def closing_line(sums)
      "#{sums[:passed]} passed, #{sums[:failed]} failed, #{sums[:skipped]} skipped"
    end

    def outcome(word)
      case word
      when "Passed" then :passed
      when /\A\*{3}Skipped/, /\A\*{3}Not Run \(Disabled/ then :skipped
      else :failed
      end
    end

    private_class_method :outcome, :append
  end
end

if $0 == __FILE__
  path = ARGV.fetch(0)
  results = Setup::Summary.read(path)
  sums = Setup::Summary.total(results)
  puts Setup::Summary.reports(results), Setup::Summary.table(results), "", Setup::Summary.skipped(results), Setup::Summary.closing_line(sums)
  exit(sums[:failed].zero? && sums[:passed].positive?)
end
