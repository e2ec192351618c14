# frozen_string_literal: true

require "socket"
require_relative "launching/world"
require_relative "launching/spawned"

module Torch
  module Distributed
    # The variables by which a process that {Launching#fork_world} spawned knows its rank. SCRIPT and TEST may be
    # set by the program: the file to run instead of the program's own, and the test to run in it.
    SPAWN_ENV_KEY = "TORCH_DISTRIBUTED_SPAWNED"
    # The process's rank.
    SPAWN_RANK_ENV_KEY = "TORCH_DISTRIBUTED_SPAWN_RANK"
    # How many processes there are.
    SPAWN_WORLD_SIZE_ENV_KEY = "TORCH_DISTRIBUTED_SPAWN_WORLD_SIZE"
    # The port that the block is called with.
    SPAWN_PORT_ENV_KEY = "TORCH_DISTRIBUTED_SPAWN_PORT"
    # Where the store is.
    SPAWN_STORE_PORT_ENV_KEY = "TORCH_DISTRIBUTED_SPAWN_STORE_PORT"
    # The descriptor for the block's value.
    SPAWN_PIPE_ENV_KEY = "TORCH_DISTRIBUTED_SPAWN_PIPE"
    # The file to run.
    SPAWN_SCRIPT_ENV_KEY = "TORCH_DISTRIBUTED_SPAWN_SCRIPT"
    # The test to run in it.
    SPAWN_TEST_ENV_KEY = "TORCH_DISTRIBUTED_SPAWN_TEST"
    # Which call of the program's the block belongs to.
    SPAWN_CALL_ENV_KEY = "TORCH_DISTRIBUTED_SPAWN_CALL"
    # What earlier calls returned.
    SPAWN_RESULTS_ENV_KEY = "TORCH_DISTRIBUTED_SPAWN_RESULTS"

    # The program's arguments as they were when this file was loaded.
    SPAWN_ARGV = ARGV.dup.freeze

    # Worlds of processes on this machine, for tests and small programs; jobs are started with torchrun.
    module Launching
      START_METHODS = %i[fork spawn].freeze
      private_constant :START_METHODS

      # Runs the block in `world_size` new processes and returns its values.
      #
      # Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its
      # environment, so that `init_process_group` needs no arguments. MASTER_PORT is the port of a store that this
      # process hosts while they run, as torchrun does: no rank needs to outlive another for its sake. All processes are
      # gone when this returns, however it returns. The first failure ends the others.
      #
      # `:fork` copies this process; libtorch then uses one thread, and cannot run backward in the copies once
      # it has run here; nor can they use GPUs once this process has asked CUDA for anything, as
      # `Torch::CUDA.available?` does. `:spawn` starts the program anew (under Minitest the one test): up to this call each new
      # process does what this one did, the results of earlier calls are handed to it, and here it runs the
      # block and ends.
      #
      # @param world_size [Integer]
      # @param host [String] the address of MASTER_ADDR: this host's loopback address
      # @param start_method [Symbol, String] :fork or :spawn
      # @yieldparam rank [Integer]
      # @yieldparam port [Integer] a free port of `host`, reserved until this returns: for a store of the block's own
      # @yieldreturn [Object] anything that Marshal can dump
      # @return [Array] the block's values, by rank
      # @raise [WorkerError] the first failure, with its rank, message and backtrace
      def fork_world(world_size, host: Rendezvous.loopback, start_method: :fork, &block)
        raise ArgumentError, "fork_world needs a block" unless block
        unless world_size.is_a?(Integer) && world_size.positive?
          raise ArgumentError, "world_size: expected 1 or more, got #{world_size.inspect}"
        end

        method = start_method.respond_to?(:to_sym) ? start_method.to_sym : start_method
        unless START_METHODS.include?(method)
          raise ArgumentError, "start_method: expected :fork or :spawn, got #{start_method.inspect}"
        end

        start_world(world_size, host, method, Spawned.call(caller_locations(1, 1), method, block), &block)
      end

      # @param host [String] an address of this machine
      # @return [Integer] a TCP port that is free now
      def free_port(host: Rendezvous.loopback)
        server = TCPServer.new(host, 0)
        server.addr[1]
      ensure
        server&.close
      end

      private

      # @param call [Spawned::Call] the call that these processes are for
      def start_world(world_size, host, method, call, &block)
        start = -> { World.new(world_size, host, method, call, block).run }
        Spawned.perform(call, start, reruns: method == :spawn) do
          Spawned.take_part { |rank, port, store_port| run_here(rank, world_size, host, port, store_port, &block) }
        end
      end

      # The block, in a process of its own. Without `store_port` rank 0 hosts the store, at `port`.
      def run_here(rank, world_size, host, port, store_port)
        _die_with_parent
        # A world of its own, even where the program itself was started by torchrun.
        ENV.delete_if { |name, _| name.start_with?("TORCHELASTIC_") }
        ENV.update("RANK" => rank.to_s, "LOCAL_RANK" => rank.to_s, "WORLD_SIZE" => world_size.to_s,
          "LOCAL_WORLD_SIZE" => world_size.to_s, "MASTER_ADDR" => host, "MASTER_PORT" => (store_port || port).to_s)
        ENV["TORCHELASTIC_USE_AGENT_STORE"] = "True" if store_port
        yield rank, port
      end

      # OpenMP's threads do not survive a fork, and waiting for them would never end.
      def run_forked(rank, world_size, host, port, store_port, &block)
        _set_num_threads(1)
        run_here(rank, world_size, host, port, store_port, &block)
      end
    end
  end
end
