# frozen_string_literal: true

require_relative "native"
require_relative "tests"

module Setup
  # Measures which lines the quick tests reach: of C and C++ by the C tests (gcov, summed up by gcovr), of Ruby by the Ruby tests
  # (Ruby's own Coverage; test/coverage.rb has each process write what it saw).
  module Coverage
    RUBY_LINES = File.join(ROOT, "build/coverage-ruby")

    module_function

    # @raise [Failure]
    def run(libtorch)
      SystemPackages.ensure!(SystemPackages::COVERAGE, why: "sums up what gcov says")
      print_table("C and C++, by the C tests", c(libtorch))
      print_table("Ruby, by the Ruby tests", ruby)
    end

    # @return [Hash{String => Array(Integer, Integer)}] for each file the lines that were reached, and all
    def c(libtorch)
      folder = Native.cmake("coverage", libtorch: libtorch, options: {"TDDP_COVERAGE" => "ON", "CMAKE_BUILD_TYPE" => "Debug"})
      Dir.glob("**/*.gcda", base: folder).each { |path| File.unlink(File.join(folder, path)) }
      Tests.run { |tests| tests.leg("c") { tests.ctest("c", folder, jobs: Etc.nprocessors, only: %w[-LE slow]) } }
      summary = File.join(folder, "summary.json")
      Console.step("coverage: gcovr", "gcovr", "--root", ROOT, "--object-directory", folder, "--filter", "src/", "--json-summary", summary, folder,
        "-j", Etc.nprocessors.to_s, log: "coverage", cure: "the message in the log")
      JSON.parse(File.read(summary)).fetch("files").to_h { |file| [file["filename"], file.values_at("line_covered", "line_total")] }
    end

    # @return as {c}
    def ruby
      FileUtils.rm_rf(RUBY_LINES)
      FileUtils.mkdir_p(RUBY_LINES)
      Tests.run do |tests|
        tests.leg("ruby") do
          tests.minitest("ruby", "test/ruby/**/*_test.rb", jobs: Etc.nprocessors, preload: File.join(ROOT, "test/coverage.rb"),
            env: {"TDDP_COVERAGE" => RUBY_LINES})
        end
      end
      # Each process wrote, for each file, how often each line ran, and nil for a line without code.
      processes = Dir.glob("#{RUBY_LINES}/*.json").flat_map { |path| JSON.parse(File.read(path)).to_a }
      processes.group_by(&:first).transform_values do |dumps|
        lines = dumps.map(&:last).transpose.map(&:compact).reject(&:empty?)
        [lines.count { |counts| counts.sum.positive? }, lines.size]
      end
    end

    def print_table(title, counts)
      folders = counts.group_by { |path, _| File.dirname(path) }.transform_values { |files| files.map(&:last).transpose.map(&:sum) }
      Console.say "", title
      [*folders.sort, ["in all", counts.values.transpose.map(&:sum)]].each do |folder, (reached, all)|
        Console.say format("  %-40s %5.1f %%   %6d of %6d lines", folder, 100.0 * reached / [all, 1].max, reached, all)
      end
    end
  end
end
