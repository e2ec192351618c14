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

    def_delegators :@root, :obstacle, :make

    def initialize
      @root = Root.new("debian13", PACKAGES)
    end

    # @return [String] the root's folder
    def root
      @root.folder
    end

    # Brings the present sources and runs the tests inside.
    #
    # @return [Array(Boolean, String)] whether all was well, and the file of the results
    def test
      @root.using do
        results = File.join(root, RESULTS)
        FileUtils.rm_f(results)
        status, = Console.tee(*@root.enter("sh", "-c", "cd #{Root::SOURCE} && mkdir -p build && exec rake test"), log: "debian13",
          env: @root.environment("TDDP_RESULTS" => RESULTS), limit: 2400)
        [status&.success? || false, results]
      end
    end
  end
end
