# frozen_string_literal: true

module Torch
  module Distributed
    # Ranks that carry out the same operations in the same order. Made by
    # {Torch::Distributed.init_process_group}.
    #
    # @!method rank
    #   @return [Integer] this process's place in the group
    # @!method size
    #   @return [Integer] how many ranks there are
    # @!method name
    #   @return [String]
    # @!method backend
    #   @return [String] "gloo" for instance
    # @!method closed?
    #   @return [Boolean] whether it was destroyed
    # @!attribute timeout
    #   @return [Float] how many seconds each operation may take
    class ProcessGroup
      alias_method :world_size, :size

      # @return [Array<Integer>] the global ranks of its processes, by their rank in the group
      def ranks
        @ranks ||= Array.new(size) { |rank| rank }.freeze
      end

      # @param global_rank [Integer]
      # @return [Integer, nil] the rank in this group of the process with that global rank; nil if it is not in it
      def group_rank(global_rank)
        @places ||= ranks.each_with_index.to_h.freeze
        @places[global_rank]
      end

      def inspect
        closed? ? "#<#{self.class.name} destroyed>" : "#<#{self.class.name} #{name.inspect} #{backend} rank #{rank} of #{size}>"
      end
    end

    # The life of the default process group.
    module Groups
      # Seconds that operations under way get to finish when the group is destroyed, when that happens because of
      # an exception (the other ranks may not come any more), and at the process's exit.
      DRAIN = 10
      FAILED_DRAIN = 0.5
      EXIT_DRAIN = 2
      private_constant :DRAIN, :FAILED_DRAIN, :EXIT_DRAIN

      # The group, the process that made it, and the store that ends with it.
      Default = Struct.new(:group, :pid, :store)
      private_constant :Default

      # @return [Boolean] true: this build has process groups
      def available?
        true
      end
      alias_method :is_available?, :available?

      # @return [Boolean] whether this process has a default process group
      def initialized?
        !default_here.nil?
      end
      alias_method :is_initialized?, :initialized?

      # @return [Boolean] whether torchrun started this process
      def torchelastic_launched?
        ENV.key?("TORCHELASTIC_RUN_ID")
      end

      # Joins this process with the others of the job; returns when all are there.
      #
      # @param backend [String, Symbol, nil] "gloo" or "nccl"; nil: nccl where there are GPUs, else gloo
      # @param init_method [String] where the processes meet: `env://` (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as
      #   torchrun sets them), `tcp://host:port` or `file:///path`; rank and world size may follow as
      #   `?rank=0&world_size=2`
      # @param store [Store, nil] where they meet, instead of `init_method`
      # @param rank [Integer, nil] this process's place, from 0
      # @param world_size [Integer, nil] how many processes there are
      # @param timeout [Numeric] seconds: of joining, and of each operation later
      # @param wait_for_workers [Boolean] whether the store's server waits for everybody first
      # @param device_id [Integer, Torch::Device, nil] the GPU of this process, for nccl; nil: LOCAL_RANK
      # @return [ProcessGroup]
      # @raise [ArgumentError] naming the argument or variable that is wrong
      # @raise [Error] if the processes cannot meet
      def init_process_group(backend = nil, init_method: "env://", store: nil, rank: nil, world_size: nil,
        timeout: DEFAULT_TIMEOUT, wait_for_workers: true, device_id: nil)
        if initialized?
          raise GroupError, "the default process group is already initialized: call destroy_process_group first"
        end

        check_timeout(timeout)
        backend = (backend || get_default_backend_for_device(device_id)).to_s
        ProcessGroup._find_backend(backend)
        place = Rendezvous.meet(init_method, store: store, rank: rank, world_size: world_size,
          timeout: timeout, wait_for_workers: wait_for_workers)
        @default = Default.new(join(backend, place, timeout, device_id), Process.pid, place.owned ? place.store : nil)
        destroy_at_exit
        @default.group
      end

      # Ends the default process group: operations under way get a moment to finish. Harmless without a group.
      def destroy_process_group
        default = default_here
        @default = nil
        close(default, $! ? FAILED_DRAIN : DRAIN) if default
        nil
      end

      # @return [ProcessGroup, nil]
      def default_process_group
        default_here&.group
      end

      # @param group [ProcessGroup, nil] nil: the default group
      # @return [Integer] this process's rank
      def get_rank(group = nil)
        group_or_default(group).rank
      end

      # @param group [ProcessGroup, nil] nil: the default group
      # @return [Integer] how many ranks there are
      def get_world_size(group = nil)
        group_or_default(group).size
      end

      # @param group [ProcessGroup, nil] nil: the default group
      # @return [String] "gloo" for instance
      def get_backend(group = nil)
        group_or_default(group).backend
      end

      private

      # A group that was made before a fork belongs to the parent.
      def default_here
        @default if @default && @default.pid == Process.pid
      end

      def group_or_default(group)
        return group if group.is_a?(ProcessGroup)
        unless group.nil? || GroupMember::WORLD.equal?(group)
          raise TypeError, "group: expected a Torch::Distributed::ProcessGroup or nil, got #{group.inspect}"
        end

        default_process_group || raise(GroupError, @default ?
          "the default process group was made before a fork, in process #{@default.pid}: call init_process_group in this process" :
          "the default process group is not initialized: call Torch::Distributed.init_process_group first")
      end

      def check_timeout(timeout)
        return if timeout.is_a?(Numeric) && timeout.positive?

        raise ArgumentError, "timeout: expected a positive number of seconds, got #{timeout.inspect}"
      end

      def join(backend, place, timeout, device_id)
        index = device_index(device_id, place.rank, place.world_size) if backend == "nccl"
        group = ProcessGroup._create(backend, group_name(place.scope), place.store, place.rank, place.world_size, timeout, index)
      ensure
        place.store.close if place.owned && group.nil?
      end

      # Groups that follow each other on one store must not read each other's keys.
      def group_name(scope)
        @groups_at ||= Hash.new(-1)
        number = case scope
        when nil then 0
        when Store then scope.next_group
        else @groups_at[scope] += 1
        end
        number.zero? ? "default_pg" : "default_pg/#{number}"
      end

      def close(default, drain)
        default.group._shutdown(drain)
      ensure
        default.store&.close
      end

      # Once a process, and so late that it runs before what was there when this file was loaded.
      def destroy_at_exit
        return if @exit_pid == Process.pid

        @exit_pid = Process.pid
        at_exit do
          default = default_here
          @default = nil
          close(default, ($!.nil? || ($!.is_a?(SystemExit) && $!.success?)) ? EXIT_DRAIN : 0) if default
        rescue Error => e
          warn "torch-ddp: #{e.message}" if $DEBUG
        end
      end
    end
  end
end
