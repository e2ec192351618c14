# frozen_string_literal: true

require "fileutils"
require "forwardable"
require_relative "console"
require_relative "root"
require_relative "system_packages"

module Setup
  # The same sources and tests on Debian 13 (libtorch 2.6, torch-rb 0.19.1, Ruby 3.3). Its root keeps the gems, compiled
  # inside, and the last build's products.
  class Debian13
    extend Forwardable

    PACKAGES = (%w[ca-certificates procps rake ruby ruby-bundler] + SystemPackages::BUILD + SystemPackages::LIBTORCH +
      SystemPackages::PYTORCH).sort.freeze
    RESULTS = "#{Root::SOURCE}/build/results.jsonl"

    # Seconds; what has not ended then counts as not run.
    LIMIT = 3600

    def_delegators :@root, :obstacle, :make

    def initialize
      @root = Root.new("debian13", PACKAGES)
    end

    # @return [String] the root's folder
    def root
      @root.folder
    end

    # One leg's work: brings the present sources and runs the quick tests inside.
    #
    # @param tests [Tests]
    # @param c [Unchanged] whether the C tests need not be run
    def run(tests, c)
      if (reason = obstacle || make)
        return tests.skip("debian13", reason)
      end

      started = Console.now
      results = File.join(root, RESULTS)
      legs = Legs::QUICK
      if (reason = c.reason)
        tests.skip("debian13/c", reason)
        legs -= [:c]
      end
      status = @root.using { run_inside(legs, results) }
      passed = tests.adopt("debian13", results, started, status: status, limit: LIMIT)
      c.passed! if passed && legs.include?(:c)
    end

    private

    def run_inside(legs, results)
      FileUtils.rm_f(results)
      Console.tee(*@root.enter("sh", "-c", "cd #{Root::SOURCE} && mkdir -p build && exec rake test"), log: "debian13",
        env: @root.environment("TDDP_RESULTS" => RESULTS, "TDDP_LEGS" => legs.join(","), "TDDP_TEST_SLOTS" => "3"), limit: LIMIT).first
    end
  end
end
