# frozen_string_literal: true

module Torch
  module Distributed
    # Creates and destroys the default process group, and answers queries about any group.
    module Groups
      # Seconds that operations under way get to finish when groups are destroyed, when that happens because of
      # an exception (the other ranks may not come any more), and at the process's exit. As long again a process that
      # hosts the store of the default group stays for the other ranks to leave it.
      DRAIN = 10
      FAILED_DRAIN = 0.5
      EXIT_DRAIN = 2

      # How often, and after how many seconds, to look for the store again if the one that was there is ending.
      STALE_STORES = 20
      STALE_PAUSE = 0.02
      private_constant :DRAIN, :FAILED_DRAIN, :EXIT_DRAIN, :STALE_STORES, :STALE_PAUSE

      # The default group, the store that ends with it, the GPU it was given, and the groups made in it since, which are
      # kept here: one that the collector took would fail the others' operations.
      Default = Struct.new(:group, :store, :device_id, :others)
      LOCK = Mutex.new
      private_constant :Default, :LOCK

      # @return [Boolean] true: this build has process groups
      def available?
        true
      end
      alias_method :is_available?, :available?

      # @return [Boolean] whether this process has a default process group
      def initialized?
        !@default.nil?
      end
      alias_method :is_initialized?, :initialized?

      # @return [Boolean] whether torchrun started this process
      def torchelastic_launched?
        ENV.key?("TORCHELASTIC_RUN_ID")
      end

      # Who this process is among those that a launcher started: torchrun, or one of the schedulers that
      # {#init_process_group} knows. Needs no group, and changes nothing.
      #
      #   first = Torch::Distributed.launch_variables.fetch("RANK", "0") == "0"
      #
      # @return [Hash{String => String}] RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as far as they are known
      # @raise [ArgumentError] if what a scheduler left in the environment is incomplete
      def launch_variables
        Schedulers.variables
      end

      # Joins this process with the others of the job; returns when all are there.
      #
      # With `env://` the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say who and where, as torchrun sets
      # them. What they leave open is taken from a scheduler that started the process as one of several:
      #
      #   srun --ntasks=8 ruby train.rb       # Slurm, by SLURM_PROCID, SLURM_STEP_NUM_TASKS and their like
      #   mpirun -np 8 ruby train.rb          # Open MPI, by OMPI_COMM_WORLD_RANK and its like
      #   mpiexec -n 8 ruby train.rb          # MPICH and others with Hydra, by PMI_RANK and its like
      #
      # Rank 0 serves the store there. On one machine the others meet it at 127.0.0.1 (or ::1); on several at the first host of
      # Slurm's step, or where mpirun runs (MPICH does not say: set MASTER_ADDR). The port is made from the number of the
      # job and the step, so that jobs that share a machine do not meet. Variables that are set go before all this, and
      # those that are not, LOCAL_RANK and LOCAL_WORLD_SIZE among them, are set for the script then; processes that it
      # starts have them too.
      #
      # @param backend [String, Symbol, nil] "gloo", "nccl", "mpi", or one for each kind of device: "cpu:gloo,cuda:nccl"; nil: that
      #   where there are GPUs, else gloo; with `device_id` what serves that device
      # @param init_method [String] where the processes meet: `env://`, `tcp://host:port` or `file:///path`; rank and world size may follow as
      #   `?rank=0&world_size=2`
      # @param store [Store, nil] where they meet, instead of `init_method`
      # @param rank [Integer, nil] this process's place, from 0
      # @param world_size [Integer, nil] how many processes there are
      # @param timeout [Numeric] seconds: of joining, and of each operation later
      # @param wait_for_workers [Boolean] whether the store's server waits for all workers first
      # @param device_id [Integer, Torch::Device, nil] the GPU of this process, for nccl: its ranks connect at once, and
      #   tensors on other GPUs are refused; nil: as the tensors are, and that of LOCAL_RANK for barriers
      # @yield with a block: runs it, and then destroys all groups, however it ends
      # @yieldparam group [ProcessGroup] the default group
      # @return [ProcessGroup, Object] with a block: its value
      # @raise [ArgumentError] naming the argument or variable that is wrong
      # @raise [Error] if the processes cannot meet
      def init_process_group(backend = nil, init_method: "env://", store: nil, rank: nil, world_size: nil,
        timeout: DEFAULT_TIMEOUT, wait_for_workers: true, device_id: nil, &block)
        if initialized?
          raise GroupError, "the default process group is already initialized: call destroy_process_group first"
        end

        check_timeout(timeout)
        backend = (backend || default_backend(device_id)).to_s
        ProcessGroup._find_backend(backend)
        continue_log
        group, place = enter(backend, timeout, device_id) do
          Rendezvous.meet(init_method, store: store, rank: rank, world_size: world_size,
            timeout: timeout, wait_for_workers: wait_for_workers)
        end
        @default = Default.new(group, place.owned ? place.store : nil, device_id, [])
        @entered_pid = Process.pid
        @inherited_from = nil
        destroy_at_exit
        dump_on_signal
        open_trace(group.rank)
        block ? run_within(group, &block) : group
      end

      # Ends a group, or all of them: operations under way get a moment to finish. Each rank may end its groups in an
      # order of its own; all operations of a group should be done on every rank first. It does not wait for the other
      # ranks, with one exception: a process that hosts the TCP store by which the default group was made stays until
      # the others have destroyed theirs or are gone, ten seconds at most (half a second on the way out of an exception, in
      # an `ensure` for instance; what a `rescue` handles is none).
      # Harmless where there is no group, or none any more.
      #
      # @param group [ProcessGroup, nil] nil or the default group: all groups, the default one last, after which
      #   another may be initialized
      def destroy_process_group(group = nil)
        return if GroupMember::NON_GROUP_MEMBER.equal?(group)

        default = @default
        error = TorchDDP::PassingError.failure
        drain = error ? FAILED_DRAIN : DRAIN
        if group.nil? || GroupMember::WORLD.equal?(group) || group.equal?(default&.group)
          @default = nil
          begin
            close(default, drain, error) if default
          ensure
            close_trace
            flush_log
          end
        else
          group = group_or_default(group)
          forget(group)
          tell_why([group], error)
          group._shutdown(drain, 0)
        end
        nil
      end

      # @return [ProcessGroup, nil]
      def default_process_group
        @default&.group
      end

      # @param group [ProcessGroup, nil] nil: the default group
      # @return [Integer] this process's rank; -1 if it is not in the group
      def get_rank(group = nil)
        GroupMember::NON_GROUP_MEMBER.equal?(group) ? -1 : group_or_default(group).rank
      end
      alias_method :rank, :get_rank

      # @param group [ProcessGroup, nil] nil: the default group
      # @return [Integer] how many ranks there are; -1 if this process is not in the group
      def get_world_size(group = nil)
        GroupMember::NON_GROUP_MEMBER.equal?(group) ? -1 : group_or_default(group).size
      end
      alias_method :world_size, :get_world_size

      # @param group [ProcessGroup, nil] nil: the default group
      # @return [Boolean] whether this process is rank 0, the one that prints and writes
      def main?(group = nil)
        get_rank(group).zero?
      end

      # Runs the block on rank 0 alone; the other ranks go on at once. Operations of all ranks have no place in it.
      #
      #   Torch::Distributed.on_main { puts "epoch #{epoch}: loss #{loss}" }
      #
      # @param group [ProcessGroup, nil] whose rank 0; nil: the default group's
      # @return [Object, nil] the block's value on rank 0, elsewhere nil
      def on_main(group = nil)
        raise ArgumentError, "on_main needs a block" unless block_given?

        yield if main?(group)
      end

      # @param group [ProcessGroup, nil] nil: the default group
      # @return [String] "gloo" for instance
      def get_backend(group = nil)
        group_or_default(group).backend
      end

      # @return [Integer] how many groups this process is in, the default one among them
      def get_pg_count
        default = @default
        default ? 1 + LOCK.synchronize { default.others.size } : 0
      end

      # Changes how long each later operation of a group may take on this rank.
      #
      # @param timeout [Numeric] seconds
      # @param group [ProcessGroup, nil] nil: the default group
      def set_timeout(timeout, group = nil)
        check_timeout(timeout)
        group_or_default(group).timeout = timeout
        nil
      end

      # @param fallback_rank [Integer, nil] what to take where no launcher has set LOCAL_RANK
      # @return [Integer] this process's place on its machine
      # @raise [Error] if LOCAL_RANK is not set and there is no fallback
      def get_node_local_rank(fallback_rank = nil)
        rank = Rendezvous.env_integer("LOCAL_RANK") || Schedulers.variables["LOCAL_RANK"] || fallback_rank
        return Integer(rank) unless rank.nil?

        raise Error, "LOCAL_RANK is not set: start this process with torchrun, srun or mpirun, or give get_node_local_rank a " \
          "fallback rank"
      end

      private

      # The block may have destroyed the group, and even have made another.
      def run_within(group)
        yield group
      ensure
        destroy_process_group if group.equal?(@default&.group)
      end

      # In a forked child: the groups that were made before belong to the parent.
      def leave_to_parent
        @inherited_from = @entered_pid if @default
        @default = nil
      end

      def group_or_default(group)
        default = @default
        return default.group if group.nil? && default
        return group if group.is_a?(ProcessGroup)
        unless group.nil? || GroupMember::WORLD.equal?(group)
          raise TypeError, "group: expected a Torch::Distributed::ProcessGroup or nil, got #{group.inspect}"
        end

        default&.group || raise(GroupError, @inherited_from ?
          "the default process group was made before a fork, in process #{@inherited_from}: call init_process_group in this process" :
          "the default process group is not initialized: call Torch::Distributed.init_process_group first")
      end

      def check_timeout(timeout)
        return if timeout.is_a?(Numeric) && timeout.positive?

        raise ArgumentError, "timeout: expected a positive number of seconds, got #{timeout.inspect}"
      end

      # Joins at the place that the block finds. Where there was a default group before, its store's host may not have
      # ended it yet: who meets in the old store loses it, and comes to the new one then.
      def enter(backend, timeout, device_id)
        attempts = (@entered_pid == Process.pid) ? STALE_STORES : 0
        limit = Process.clock_gettime(Process::CLOCK_MONOTONIC) + timeout
        begin
          place = nil
          place = yield
          [join(backend, place, timeout, device_id), place]
        rescue NetworkError => e
          raise if attempts.zero? || e.status != :TDDP_NETWORK || (place && !place.owned)
          raise if Process.clock_gettime(Process::CLOCK_MONOTONIC) >= limit

          attempts -= 1
          sleep STALE_PAUSE
          retry
        end
      end

      def join(backend, place, timeout, device_id)
        index = device_index(device_id, place.rank, place.world_size) if backend.include?("nccl")
        Backend._serve(backend)
        group = ProcessGroup._create(backend, group_name(place.scope), place.store, place.rank, place.world_size, timeout,
          index, !device_id.nil?)
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

      def keep(group)
        LOCK.synchronize { @default.others << group }
        group
      end

      def forget(group)
        LOCK.synchronize { @default&.others&.delete_if { |other| other.equal?(group) } }
      end

      # All groups, those made last first. They share the time. `error` is what ends this rank's part, if anything does.
      def close(default, drain, error, host_wait: drain)
        groups = [default.group, *LOCK.synchronize { default.others.slice!(0..) }]
        tell_why(groups, error)
        deadline = Process.clock_gettime(Process::CLOCK_MONOTONIC) + drain
        close_each(groups, deadline, host_wait)
      ensure
        default.store&.close
      end

      # Ranks whose operations end for want of this one read the error's class and first line.
      def tell_why(groups, error)
        return if error.nil?

        text = begin
          (error.is_a?(SystemExit) && error.message == "exit") ? "exit #{error.status}" : error.message.to_s.lines.first.to_s
        rescue
          "" # an exception's own methods may fail as well
        end
        text = "#{error.class}: #{TorchDDP.printable(text).strip}".delete_suffix(": ")
        groups.each { |group| group._leave_because(text) }
      end

      # What ends a process that runs no handlers of its exit.
      def leave_at(error)
        default = @default
        @default = nil
        close(default, 0, error) if default
      rescue Error => e
        _warn "torch-ddp: #{e.message}" if $DEBUG
      end

      # What an exception passes by is closed all the same. The default group comes last.
      def close_each(groups, deadline, host_wait)
        return if groups.empty?

        begin
          group = groups.pop
          drain = [deadline - Process.clock_gettime(Process::CLOCK_MONOTONIC), 0].max
          group._shutdown(drain, groups.empty? ? host_wait : 0)
        ensure
          close_each(groups, deadline, host_wait)
        end
      end

      # Once a process, and so late that it runs before what was there when this file was loaded.
      def destroy_at_exit
        return if @exit_pid == Process.pid

        @exit_pid = Process.pid
        at_exit do
          default = @default
          # A launcher ends the others when a process has failed: what they were in is news as well.
          try_to_dump if default && $!.is_a?(SignalException)
          @default = nil
          error = TorchDDP::PassingError.failure
          close(default, error ? 0 : EXIT_DRAIN, error, host_wait: error ? FAILED_DRAIN : EXIT_DRAIN) if default
        rescue Error => e
          _warn "torch-ddp: #{e.message}" if $DEBUG
        ensure
          close_trace
        end
      end
    end
  end
end
