# frozen_string_literal: true

module Torch
  module Distributed
    # Rank and world size of a process that was started by a scheduler's launcher instead of torchrun: Slurm's srun, Open MPI's mpirun or
    # MPICH's mpiexec. PyTorch's own variables go before theirs.
    #
    # @api private
    module Schedulers
      # @return [Integer]
      # @raise [ArgumentError] naming the variable and its value
      def self.whole(name, text)
        Integer(text, 10)
      rescue ArgumentError
        raise ArgumentError, "#{name} expected a whole number, got #{text.inspect}"
      end
    end
  end
end

require_relative "schedulers/slurm"
require_relative "schedulers/mpi"

module Torch
  module Distributed
    module Schedulers
      LOOKED_FOR = "a task of Slurm's srun (SLURM_PROCID with SLURM_STEP_ID), Open MPI's mpirun (OMPI_COMM_WORLD_RANK) or " \
        "MPICH's mpiexec (PMI_RANK)"

      class << self
        # The launcher that is nearest to the process: mpirun and mpiexec start their helpers by srun where there is
        # Slurm, and srun may hand PMI's variables to its own tasks.
        #
        # @param env [Hash{String => String}]
        # @return [Task, nil]
        # @raise [ArgumentError] if what a launcher left is incomplete
        def task(env = ENV)
          OpenMPI.find(env) || hydra(env) || Slurm.find(env)
        end

        # Who this process is: PyTorch's variables where they are set, else the scheduler's words in their place, if the
        # two do not contradict each other.
        #
        # @return [Hash{String => String}] any of RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE
        def variables(env = ENV)
          set = %w[RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE].filter_map { |name| [name, env[name]] if env[name] }.to_h
          return set if set.key?("LOCAL_RANK") && set.key?("RANK") && set.key?("WORLD_SIZE")

          found = task(env)&.variables || {}
          (found.slice("RANK", "WORLD_SIZE") == found.merge(set).slice("RANK", "WORLD_SIZE")) ? found.merge(set) : set
        end

        # @return [String, nil] why a scheduler's job does not say who this process is
        def obstacle(env = ENV)
          Slurm.obstacle(env)
        end

        private

        # With --mpi=pmi2 srun's tasks have PMI's variables too, and Slurm knows more of them.
        def hydra(env)
          found = Hydra.find(env) or return
          step = Slurm.find(env)
          (step && [step.rank, step.world_size] == [found.rank, found.world_size]) ? step : found
        end
      end
    end
  end
end
