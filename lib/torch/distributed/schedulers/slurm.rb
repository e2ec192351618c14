# frozen_string_literal: true

require_relative "host_list"
require_relative "task"

module Torch
  module Distributed
    module Schedulers
      # A task of a job step: one of those that `srun` started.
      #
      # @api private
      class Slurm < Task
        SIGN = "SLURM_PROCID"
        COMMAND = "srun"
        SETTING = "export MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)"

        # Steps with such numbers are no step of srun's: the batch script, an interactive shell and the like.
        SPECIAL_STEPS = 0xffff_fff0

        # The script of sbatch has SLURM_PROCID and SLURM_NTASKS as well, but it is one process in no step.
        #
        # @return [Slurm, nil]
        def self.find(env)
          step = (env["SLURM_STEP_ID"] || env["SLURM_STEPID"]).to_s[/\A\d+\z/]
          new(env) if step && Integer(step, 10) < SPECIAL_STEPS && !env[SIGN].to_s.empty?
        end

        # @return [String, nil] why a process within a job is no task
        def self.obstacle(env)
          job = env["SLURM_JOB_ID"] or return

          "Slurm's job #{job} is this process's, but it is no task of a step: start it with srun"
        end

        def launcher
          "Slurm's srun"
        end

        # Ports that Slurm keeps for the step (srun --resv-ports) are no other's.
        def master_port
          reserved = @env["SLURM_STEP_RESV_PORTS"].to_s[/\A\d+/]
          return Integer(reserved, 10) if reserved

          port_of(number("SLURM_JOB_ID", "SLURM_JOBID"), number("SLURM_STEP_ID", "SLURM_STEPID"))
        end

        private

        # What is said of the step goes before what is said of the job.
        def read
          @rank = number(SIGN)
          @world_size = number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
          @local_rank = number_if_set("SLURM_LOCALID")
          @local_world_size = tasks_on_this_node
        end

        def tasks_on_this_node
          text = @env["SLURM_STEP_TASKS_PER_NODE"] || @env["SLURM_TASKS_PER_NODE"] or return
          node = number_if_set("SLURM_NODEID") or return

          HostList.counts(text)[node]
        end

        # Slurm numbers tasks from the first node on, whatever the distribution, unless the order of hosts is one's own:
        # then the list has them sorted all the same.
        def host_of_rank_zero
          if @env["SLURM_DISTRIBUTION"].to_s.start_with?("arbitrary") || (rank.zero? && number_if_set("SLURM_NODEID")&.positive?)
            unknown_host("its tasks are distributed by a list of one's own")
          end
          list = @env["SLURM_STEP_NODELIST"] || @env["SLURM_JOB_NODELIST"] || @env["SLURM_NODELIST"]
          unknown_host("SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are not set") if list.to_s.empty?

          HostList.expand(list).first
        end
      end
    end
  end
end
