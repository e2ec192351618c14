# frozen_string_literal: true

require_relative "run/arguments"
require_relative "run/commands"

module Torch
  module Distributed
    # What the block of {Run#run} gets: the place of its process in the world.
    #
    # @!attribute [r] rank
    #   @return [Integer]
    # @!attribute [r] local_rank
    #   @return [Integer] the place among the processes of this machine
    # @!attribute [r] world_size
    #   @return [Integer] how many processes there are
    # @!attribute [r] local_world_size
    #   @return [Integer] how many of them this machine has
    # @!attribute [r] device
    #   @return [Torch::Device] for this process's model and data
    # @!attribute [r] mesh
    #   @return [DeviceMesh, nil] nil if none was asked for
    RunContext = Struct.new(:rank, :local_rank, :world_size, :local_world_size, :device, :mesh, keyword_init: true) do
      # @return [Boolean] whether this is rank 0, the one that prints and writes
      def main?
        rank.zero?
      end
    end

    # Sets up a process for training, and cleans up behind it.
    module Run
      # The place of a process that is the world.
      ALONE = -> { {store: HashStore.new, rank: 0, world_size: 1} }
      private_constant :ALONE

      # Runs the block within a process group, with its device, its random numbers and its mesh set up; destroys all groups
      # however the block ends.
      #
      #   Torch::Distributed.run(processes: 2, mesh: {dp: -1}) do |ctx|
      #     model = Torch::NN::Parallel::DistributedDataParallel.new(MyModel.new.to(ctx.device))
      #     train(model)
      #     puts "done on #{ctx.world_size} ranks" if ctx.main?
      #   end
      #
      # Processes that a launcher started (torchrun, srun, mpirun, or anything else that sets what `env://` reads) are the
      # ranks; `processes` is not looked at then. Without a launcher this call starts `processes` processes on this
      # machine, each of which runs the program again up to this call, runs the block and ends; the first failure ends the
      # others, and all have ended when this returns. Without `processes`, or with 1, the world is this process alone.
      # A single process that a scheduler started counts as one without a launcher.
      #
      # What is typed into irb, or given to `ruby -e`, lies in no file that could be run again. On the CPU the processes are copies of
      # this one then, which begin at the block: they see the variables there are, and compute with one thread each. As with
      # {Launching#fork_world}, they cannot run backward once this process itself has.
      #
      #   irb> Torch::Distributed.run(4, device: "cpu") { |ctx| Torch::Distributed.all_reduce(Torch.ones(1)).item }
      #   => 4.0
      #
      # An exception in the block is written where torchrun looks for it, so that it is the root cause in torchrun's report,
      # and then raised here; the other ranks raise a {PeerLostError} that names the rank in the call that waits for it, and the
      # exception too unless the store has ended with the rank. If it was raised in a process that this call started, a
      # {WorkerError} that names the rank, the exception and its place is raised instead.
      #
      # `seed` is the same on all ranks, so that they make equal models. They then also drop out the same elements of their batches, and
      # draw the same augmentations. `seed_by_rank: true` seeds each rank with the sum of `seed` and its rank: for a model that is made
      # equal otherwise, as `DistributedDataParallel` does with what rank 0 has. A model that is sharded or divided starts from equal
      # values on all ranks: seed again once it is made, `Torch.manual_seed(seed + ctx.rank)`.
      #
      # `nodes` and `gpus_per_node` are what the job must have: that many machines, and on each so many GPUs, with a process
      # for each. Without a launcher, and for one machine, `gpus_per_node` is what `processes` is. For several, the torchrun
      # commands that start the program on each of them are printed, and the program exits with status 2; `processes` is then
      # the number on each machine, for machines without GPUs. The first machine is this one, unless MASTER_ADDR is set.
      #
      # Arguments must be the same on all ranks, except `seed` and the number of the GPU in `device`. They are checked before a
      # rank waits for another; what differs between machines, such as their GPUs, is checked on all, and raised on all.
      #
      # @param count [Integer, nil] short for `processes`
      # @param processes [Integer, nil] how many processes to start if no launcher did
      # @param nodes [Integer, nil] how many machines the job must have; nil: any number
      # @param gpus_per_node [Integer, nil] how many GPUs and processes each machine must have; nil: any number
      # @param backend [String, Symbol, nil] as for {Groups#init_process_group}; nil: "gloo" for the CPU,
      #   "cpu:gloo,cuda:nccl" for GPUs
      # @param seed [Integer, nil] for libtorch's random numbers and Ruby's own; nil: neither is seeded
      # @param seed_by_rank [Boolean] whether each rank adds its rank to the seed
      # @param mesh [Hash{Symbol, String => Integer, nil}, nil] names and sizes of the dimensions of a {DeviceMesh} of all
      #   processes; one size may be -1 or nil, for what the others leave
      # @param device [String, Symbol, Torch::Device, nil] "cpu", "cuda" for the GPU with the process's local rank, or
      #   "cuda:1"; nil: "cuda" where there are GPUs, else "cpu". A process that sees only one GPU has that one
      # @param timeout [Numeric, nil] seconds, of joining and of each operation; nil: half an hour
      # @yieldparam context [RunContext]
      # @return [Object] the block's value on this rank; where this call started the processes that of rank 0, nil if
      #   Marshal cannot dump it (a tensor, for instance)
      # @raise [ArgumentError, TypeError] naming the argument, what it is and what was expected
      # @raise [GroupError] if there is a default process group already
      # @raise [MismatchError] on all ranks, if the arguments differ or are wrong on one of the machines
      # @raise [WorkerError] if a process that this call started fails
      def run(count = nil, processes: count, nodes: nil, gpus_per_node: nil, backend: nil, seed: 0, seed_by_rank: false, mesh: nil,
        device: nil, timeout: nil, &block)
        raise ArgumentError, "run needs a block" unless block
        unless count.nil? || processes == count
          raise ArgumentError, "processes: #{processes.inspect}, but #{count.inspect} were asked for before: give one of the two"
        end
        refuse_second_group("run")
        arguments = Arguments.new(processes: processes, nodes: nodes, gpus_per_node: gpus_per_node, backend: backend, seed: seed,
          seed_by_rank: seed_by_rank, mesh: mesh, device: device, timeout: timeout)
        return run_as_rank(arguments, &block) if arguments.launched?

        Commands.new(arguments).leave_to_torchrun if arguments.nodes > 1
        arguments.check_local_gpus
        count = arguments.processes
        return run_as_rank(arguments, **ALONE.call, &block) if count == 1

        locations = caller_locations(1, 1)
        method = (arguments.device_type == "cpu" && !Spawned.in_file?(locations)) ? :fork : :spawn
        start_world(count, Rendezvous.loopback, method, Spawned.call(locations, method, block)) do |rank|
          value = run_as_rank(arguments, &block)
          dumpable(value) if rank.zero?
        end.first
      end

      private

      # As {#run}, for programs that go on in the group: this process must be one of the ranks, or the only one.
      #
      # @return [RunContext]
      def enter_world(nodes: nil, gpus_per_node: nil, backend: nil, seed: 0, device: nil, timeout: nil)
        refuse_second_group("setup")
        arguments = Arguments.new(processes: nil, nodes: nodes, gpus_per_node: gpus_per_node, backend: backend, seed: seed, mesh: nil,
          device: device, timeout: timeout)
        alone = !arguments.launched?
        Commands.new(arguments).leave_to_torchrun if alone && arguments.nodes * arguments.processes > 1
        arguments.check_local_gpus if alone
        group = init_process_group(arguments.backend, timeout: arguments.timeout, **(alone ? ALONE.call : {}))
        agree_on_context(arguments, group).tap { seed_random_numbers(arguments.seed) }
      rescue
        destroy_process_group if group
        raise
      end

      def refuse_second_group(name)
        raise GroupError, "#{name} makes the default process group, but there is one already: call destroy_process_group first" if initialized?
      end

      def run_as_rank(arguments, **place, &block)
        Elastic.record do
          init_process_group(arguments.backend, timeout: arguments.timeout, **place) do |group|
            context = agree_on_context(arguments, group)
            seed_random_numbers(arguments.seed_of(context.rank))
            block.call(context)
          end
        end
      end

      # A rank whose machine is not as it should be raises on all.
      def agree_on_context(arguments, group)
        context = with_store_of(group, "run") do |_, talk|
          agreement = Agreement.new(talk, "run", group)
          agreement.hold { arguments.context(group).tap { agreement.reach("run(#{arguments})") } }
        end
        sizes = arguments.mesh_sizes
        context.mesh = init_device_mesh(arguments.device_type, sizes.values, mesh_dim_names: sizes.keys) if sizes
        context.freeze
      end

      def seed_random_numbers(seed)
        return if seed.nil?

        Torch.manual_seed(seed)
        srand(seed)
      end

      def dumpable(value)
        Marshal.dump(value)
        value
      rescue TypeError
        nil
      end
    end
  end
end
