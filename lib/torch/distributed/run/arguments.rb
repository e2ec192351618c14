# frozen_string_literal: true

require "socket"

module Torch
  module Distributed
    module Run
      # The arguments of {Run#run}, validated and completed by what the launcher has set. Nothing here waits for another
      # process.
      #
      # @api private
      class Arguments
        LAST_SEED = 2**63 - 1
        DEVICE = /\A(cpu|cuda)(?::(\d+))?\z/
        private_constant :LAST_SEED, :DEVICE

        # @return [Integer] machines, as asked for; 1 if not
        attr_reader :nodes

        # @return [Integer] processes of each machine, if no launcher has decided this
        attr_reader :processes

        # @return [Integer, nil]
        attr_reader :gpus_per_node, :seed

        # @return [String]
        attr_reader :backend, :device_type

        # @return [Numeric] seconds
        attr_reader :timeout

        # @return [Hash{String => Integer}, nil] the mesh's dimensions, complete
        attr_reader :mesh_sizes

        # @raise [ArgumentError, TypeError] naming what is wrong, and what was expected
        def initialize(processes:, nodes:, gpus_per_node:, backend:, seed:, mesh:, device:, timeout:, seed_by_rank: false)
          {processes: processes, nodes: nodes, gpus_per_node: gpus_per_node}.each { |name, value| check_count(name, value) }
          @asked_nodes, @gpus_per_node = nodes, gpus_per_node
          @nodes = nodes || 1
          @processes = gpus_per_node || processes || 1
          @seed = check_seed(seed)
          @seed_by_rank = check_seed_by_rank(seed_by_rank)
          @timeout = timeout.nil? ? DEFAULT_TIMEOUT : timeout
          Distributed.send(:check_timeout, @timeout)
          @device_type, @device_index = parse_device(device)
          @backend = check_backend(backend)
          launched? ? check_launched : check_unlaunched(processes)
          @mesh_sizes = complete(mesh)
        end

        # @return [Boolean] whether a launcher started this process as one of the ranks
        def launched?
          return @launched unless @launched.nil?

          variables = Schedulers.variables
          @launched = ENV.key?("RANK") || ENV.key?("WORLD_SIZE") || Integer(variables.fetch("WORLD_SIZE", "1"), 10) > 1
        end

        # @return [Integer, nil] what this rank's random numbers are seeded with
        def seed_of(rank)
          @seed_by_rank ? (@seed + rank) % (LAST_SEED + 1) : @seed
        end

        # Before processes are started: whether each will have its GPU.
        def check_local_gpus
          check_visible_gpus
          return if @device_type == "cpu" || @device_index || @processes <= gpus

          raise ArgumentError, "processes: #{@processes}, but #{visible} on this machine, and each process takes one: start fewer, or " \
            "give device: \"cpu\""
        end

        # This process's part, without the mesh. Checks what may be different on each machine.
        #
        # @return [RunContext]
        # @raise [ArgumentError] naming both numbers
        def context(group)
          known = launched_local("LOCAL_WORLD_SIZE")
          local_world_size = known || group.size
          local_rank = launched_local("LOCAL_RANK") || group.rank % local_world_size
          check_local_place(local_rank, local_world_size, group)
          check_visible_gpus
          check_local_world_size(known) if known
          RunContext.new(rank: group.rank, local_rank: local_rank, world_size: group.size, local_world_size: local_world_size,
            device: device(local_rank))
        end

        # What must be the same on all ranks.
        def to_s
          "nodes: #{@asked_nodes.inspect}, gpus_per_node: #{@gpus_per_node.inspect}, " \
            "mesh: #{@mesh_sizes ? describe(@mesh_sizes) : "nil"}, device: #{@device_type}"
        end

        private

        # --- numbers and names ---

        def check_count(name, value)
          return if value.nil? || (value.is_a?(Integer) && value.positive?)

          raise ArgumentError, "#{name}: expected a whole number from 1 or nil, got #{value.inspect}"
        end

        def check_seed(seed)
          return seed if seed.nil? || (seed.is_a?(Integer) && seed.between?(0, LAST_SEED))

          raise ArgumentError, "seed: expected a whole number from 0 to #{LAST_SEED} or nil, got #{seed.inspect}"
        end

        def check_seed_by_rank(by_rank)
          raise ArgumentError, "seed_by_rank: expected true or false, got #{by_rank.inspect}" unless [true, false].include?(by_rank)
          raise ArgumentError, "seed_by_rank: true adds the rank to the seed, which is nil: give a seed" if by_rank && @seed.nil?

          by_rank
        end

        def check_backend(backend)
          unless backend.nil? || backend.is_a?(String) || backend.is_a?(Symbol)
            raise TypeError, "backend: expected a String, a Symbol or nil, got #{backend.inspect}"
          end

          name = (backend || ((@device_type == "cpu") ? "gloo" : Distributed.send(:default_backend, nil))).to_s
          ProcessGroup._find_backend(name)
          name
        end

        # --- the world ---

        def check_launched
          @world_size = launched_number("WORLD_SIZE", "RANK")
          launched_number("RANK", "WORLD_SIZE")
          return if @asked_nodes.nil? || @gpus_per_node.nil? || @asked_nodes * @gpus_per_node == @world_size

          raise ArgumentError, "nodes: #{@asked_nodes} with gpus_per_node: #{@gpus_per_node} is " \
            "#{@asked_nodes * @gpus_per_node} processes, but the launcher started #{@world_size}"
        end

        def launched_number(name, other)
          variables = Schedulers.variables
          text = variables.fetch(name) do
            raise ArgumentError, "#{other} is #{variables[other]}, but #{name} is not set: launchers set both"
          end
          Schedulers.whole(name, text)
        end

        def check_unlaunched(processes)
          @world_size = @nodes * @processes
          return if processes.nil? || processes == @processes

          raise ArgumentError, "processes: #{processes}, but gpus_per_node: #{@gpus_per_node}: each process has a GPU, give one of the two"
        end

        # @return [Integer, nil] nil where the launcher does not say; init_process_group then takes all ranks to be on one machine
        def launched_local(name)
          Schedulers.variables[name]&.then { |text| Schedulers.whole(name, text) }
        end

        def check_local_place(rank, size, group)
          return if size.between?(1, group.size) && rank.between?(0, size - 1)

          raise ArgumentError, "LOCAL_RANK is #{rank} and LOCAL_WORLD_SIZE #{size} in a world of #{group.size}: expected a local rank " \
            "below the local world size, and that at most the world size"
        end

        def check_local_world_size(size)
          if @gpus_per_node && @gpus_per_node != size
            raise ArgumentError, "gpus_per_node: #{@gpus_per_node}, but #{size} of #{@world_size} processes are on #{Socket.gethostname}"
          end
          return if @asked_nodes.nil? || @asked_nodes * size == @world_size

          raise ArgumentError, "nodes: #{@asked_nodes}, but #{size} of #{@world_size} processes are on #{Socket.gethostname}: " \
            "expected #{@world_size.fdiv(@asked_nodes).round(2)} on each machine"
        end

        # --- devices ---

        def parse_device(device)
          return [(gpus.zero? ? "cpu" : "cuda"), nil] if device.nil?
          unless device.is_a?(String) || device.is_a?(Symbol) || device.is_a?(Torch::Device)
            raise TypeError, "device: expected a String, a Symbol, a Torch::Device or nil, got #{device.inspect}"
          end

          match = DEVICE.match(Distributed._device_name(device).to_s)
          raise ArgumentError, "device: expected \"cpu\", \"cuda\" or \"cuda:1\" for instance, got #{device.inspect}" unless match

          [match[1], match[2] && Integer(match[2], 10)]
        end

        def device(local_rank)
          return Torch.device("cpu") if @device_type == "cpu"

          index = @device_index || ((gpus == 1) ? 0 : local_rank)
          return Torch.device("cuda:#{index}") if index < gpus

          wanted = @device_index ? "device: cuda:#{index}" : "local rank #{local_rank} takes GPU #{index}"
          raise ArgumentError, "#{wanted}, but #{visible} on #{Socket.gethostname}"
        end

        def check_visible_gpus
          return if @gpus_per_node.nil? || @gpus_per_node <= gpus

          raise ArgumentError, "gpus_per_node: #{@gpus_per_node}, but #{visible} on #{Socket.gethostname}"
        end

        def gpus
          Torch::CUDA.available? ? Torch::CUDA.device_count : 0
        end

        def visible
          (gpus == 1) ? "1 GPU is visible" : "#{gpus} GPUs are visible"
        end

        # --- the mesh ---

        def complete(mesh)
          return if mesh.nil?

          check_mesh(mesh)
          names = MeshLayout.check_names(mesh.keys, mesh.values)
          sizes = names.zip(mesh.values.map { |size| (size == -1) ? nil : size }).to_h
          known = sizes.values.compact.inject(1, :*)
          open = sizes.key(nil)
          check_product(sizes, open, known)
          sizes[open] = @world_size / known if open
          sizes.freeze
        end

        def check_product(sizes, open, known)
          return if open ? (@world_size % known).zero? : known == @world_size

          raise ArgumentError, "mesh: #{describe(sizes)}: expected " + (open ?
            "sizes that divide the world size #{@world_size}, got #{known}" :
            "a product of the world size #{@world_size}, got #{known}")
        end

        def check_mesh(mesh)
          good = mesh.is_a?(Hash) && !mesh.empty? &&
            mesh.each_value.all? { |size| size.nil? || (size.is_a?(Integer) && (size.positive? || size == -1)) }
          raise ArgumentError, "mesh: expected a Hash of names and sizes from 1, got #{mesh.inspect}" unless good
          return if mesh.each_value.count { |size| [nil, -1].include?(size) } <= 1

          raise ArgumentError, "mesh: expected a size for all dimensions but one, got #{mesh.inspect}"
        end

        def describe(sizes)
          sizes.map { |name, size| "#{name} #{size || -1}" }.join(" x ")
        end
      end
    end
  end
end
