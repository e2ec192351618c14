# frozen_string_literal: true

require "etc"
require "fileutils"
require "json"
require_relative "gems"
require_relative "native"
require_relative "system_packages"
require_relative "tests"

module Setup
  # Which lines the quick tests reach: of C and C++ by the C tests (gcov, summed up by gcovr), of Ruby by the Ruby tests
  # (Ruby's own Coverage; test/coverage.rb has each process write what it saw).
  class Coverage
    C_BUILD = "coverage"
    RUBY_LINES = File.join(ROOT, "build/coverage-ruby")

    # @raise [Failure]
    def run(libtorch)
      SystemPackages.ensure!(SystemPackages::COVERAGE, why: "sums up what gcov says")
      print_table("C and C++, by the C tests", c(libtorch))
      print_table("Ruby, by the Ruby tests", ruby)
    end

    # @param counts [Hash{String => Array(Integer, Integer)}] for each file the lines that were reached, and all
    # @return [Hash{String => Array(Integer, Integer)}] the same for each folder
    def self.by_folder(counts)
      counts.group_by { |path, _| File.dirname(path) }.transform_values { |files| files.map(&:last).transpose.map(&:sum) }.sort.to_h
    end

    # @param dumps [Array<Hash{String => Array<Integer, nil>}>] what processes saw: by path, how often each line was run; nil: no code
    # @return [Hash{String => Array(Integer, Integer)}]
    def self.merge(dumps)
      lines = dumps.each_with_object({}) do |dump, all|
        dump.each { |path, counts| all[path] = all.key?(path) ? all[path].zip(counts).map { |pair| pair.compact.sum unless pair.compact.empty? } : counts }
      end
      lines.transform_values { |counts| [counts.compact.count(&:positive?), counts.compact.size] }
    end

    private

    def c(libtorch)
      folder = Native.cmake(C_BUILD, libtorch: libtorch, options: {"TDDP_COVERAGE" => "ON", "CMAKE_BUILD_TYPE" => "Debug"})
      Dir.glob("**/*.gcda", base: folder).each { |path| File.unlink(File.join(folder, path)) }
      tests = Tests.new
      tests.leg("c") { tests.ctest("c", folder, jobs: Etc.nprocessors, only: %w[-LE slow]) }
      tests.close
      summary = File.join(folder, "summary.json")
      Console.step("coverage: gcovr", "gcovr", "--root", ROOT, "--object-directory", folder, "--filter", "src/", "--json-summary", summary, folder,
        "-j", Etc.nprocessors.to_s, log: "coverage", cure: "the message in the log")
      JSON.parse(File.read(summary)).fetch("files").to_h { |file| [file["filename"], file.values_at("line_covered", "line_total")] }
    end

    def ruby
      FileUtils.rm_rf(RUBY_LINES)
      FileUtils.mkdir_p(RUBY_LINES)
      tests = Tests.new
      tests.leg("ruby") do
        tests.minitest("ruby", "test/ruby/**/*_test.rb", jobs: Etc.nprocessors, preload: File.join(ROOT, "test/coverage.rb"),
          env: {"TDDP_COVERAGE" => RUBY_LINES})
      end
      tests.close
      self.class.merge(Dir.glob(File.join(RUBY_LINES, "*.json")).map { |path| JSON.parse(File.read(path)) })
    end

    def print_table(title, counts)
      Console.say "", title
      rows = self.class.by_folder(counts).to_a << ["in all", counts.values.transpose.map(&:sum)]
      rows.each { |folder, (reached, all)| Console.say format("  %-40s %5.1f %%   %6d of %6d lines", folder, 100.0 * reached / [all, 1].max, reached, all) }
    end
  end
end
