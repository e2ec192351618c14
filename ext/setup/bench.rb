# frozen_string_literal: true

require_relative "native"

module Setup
  # Builds and runs measurements of test/bench, which no other task builds.
  module Bench
    STORE = %w[bench_store_clients bench_store_ops].freeze
    LIMIT_S = 600

    module_function

    # @raise [Failure] if one can't be built or fails
    def store
      SystemPackages.available?(SystemPackages::PYTORCH, why: "the server beside ours")
      Native.build(Native::BUILD, *STORE)
      STORE.each do |name|
        Console.say "", "== #{name}"
        # Debian's own Python, which python3-torch is for.
        arguments = (name == "bench_store_ops") ? ["/usr/bin/python3"] : []
        run(name, *arguments)
      end
    end

    def run(name, *arguments)
      status, = Console.run(File.join(Native::BUILD, "bench", name), *arguments, log: "bench", limit: LIMIT_S, show: true)
      return if status&.success?

      raise Failure, "step failed (#{Console.ending(status)}): #{name}\n  likely cure: its messages are above"
    end

    # In a network namespace for each host where root may make them: one machine has too few ports for the connections of many hosts.
    #
    # @param sizes [Array<String>] hosts and ranks on each, in turn
    # @raise [Failure] if it can't be built or fails
    def worlds(sizes)
      sizes = %w[2 2 4 4 8 8] if sizes.empty?
      Native.build(Native::BUILD, "bench_worlds")
      ENV["TDDP_BACKEND_PATH"] ||= File.join(Native::BUILD, "lib")
      require_relative "../../test/slow/support/namespaces"
      warn("bench:worlds: all in one network namespace: #{Namespaces.obstacle}") if Namespaces.obstacle
      hosts = Namespaces.new(sizes.each_slice(2).map { |count,| Integer(count) }.max) unless Namespaces.obstacle
      run("bench_worlds", *(["--netns", hosts.prefix, hosts.ipv4(0)] if hosts), *sizes)
    ensure
      hosts&.remove
    end

    # Builds the partners of the collectives benchmark, as many as this machine allows: without libtorch there is none from Ruby.
    #
    # @return [String] the build folder
    def build_collectives
      SystemPackages.available?(SystemPackages::PYTORCH, why: "PyTorch beside ours")
      SystemPackages.available?(SystemPackages::MPI, why: "OpenMPI beside ours")
      folder = build_library
      # CMake looks again for what was installed since.
      Native.configure(folder)
      Native.build(folder, "bench_collectives")
      folder
    end

    # @return [String] the build folder that holds libtddp
    def build_library
      libtorch = Libtorch.find
      SystemPackages.ensure!(SystemPackages.needed)
      Gems.new(libtorch).ensure!
      Native.compile(libtorch)
      Native::BUILD
    rescue Failure, Libtorch::NotFound => e
      Console.say(e.message, "going on without libtorch and Ruby")
      Native.cmake("plain")
    end

    # Builds what the launcher is compared with.
    def build_launch
      SystemPackages.available?(SystemPackages::PYTORCH, why: "Python's torchrun beside ours")
      Native.build(Native::BUILD, "bench_plain_start")
    end
  end
end
