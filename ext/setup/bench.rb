# frozen_string_literal: true

require_relative "../torch_ddp/libtorch"
require_relative "console"
require_relative "gems"
require_relative "native"
require_relative "system_packages"

module Setup
  # Builds and runs measurements of test/bench, which no other task builds.
  module Bench
    STORE = %w[bench_store_clients bench_store_ops].freeze
    LIMIT_S = 600

    module_function

    # @raise [Failure] if one cannot be built or does not end well
    def store
      SystemPackages.available?(SystemPackages::PYTORCH, why: "the server beside ours")
      folder = File.join(ROOT, "build/native")
      Console.step("bench: building", "cmake", "--build", folder, "--target", *STORE, log: "bench", cure: Native::CURE)
      STORE.each do |name|
        Console.say "", "== #{name}"
        # Debian's own, for which python3-torch is.
        arguments = (name == "bench_store_ops") ? ["/usr/bin/python3"] : []
        status, = Console.tee(File.join(folder, "bench", name), *arguments, log: "bench", env: {}, limit: LIMIT_S)
        raise Failure, "step failed: #{name}\n  likely cure: what it says above" unless status&.success?
      end
    end

    # Builds the partners of the collectives benchmark, as many as can be here: without libtorch there is none from Ruby.
    #
    # @return [String] the build folder
    def build_collectives
      SystemPackages.available?(SystemPackages::PYTORCH, why: "PyTorch beside ours")
      SystemPackages.available?(SystemPackages::MPI, why: "OpenMPI beside ours")
      folder = File.join(ROOT, "build", collectives_build)
      # Once more, for what was installed since.
      Console.step("bench: configuring", "cmake", "-S", ROOT, "-B", folder, log: "bench", cure: Native::CURE)
      Console.step("bench: building", "cmake", "--build", folder, "-j", Etc.nprocessors.to_s, "--target", "bench_collectives", log: "bench",
        cure: Native::CURE)
      folder
    end

    # @return [String] the name of the build folder that holds libtddp
    def collectives_build
      libtorch = Libtorch.find
      SystemPackages.ensure!(SystemPackages.needed)
      Gems.new(libtorch).ensure!
      Native.compile(libtorch)
      "native"
    rescue Failure, Libtorch::NotFound => e
      Console.say(e.message, "going on without libtorch and Ruby")
      Native.cmake("plain")
      "plain"
    end

    # Builds what the launcher is measured against.
    def build_launch
      SystemPackages.available?(SystemPackages::PYTORCH, why: "Python's torchrun beside ours")
      Console.step("bench: building", "cmake", "--build", File.join(ROOT, "build/native"), "--target", "bench_plain_start", log: "bench",
        cure: Native::CURE)
    end
  end
end
