# frozen_string_literal: true

module Torch
  module Distributed
    module Schedulers
      # One process of several that a scheduler's own launcher started. Each kind of launcher has a class beneath
      # this one, which reads what it leaves in the environment.
      #
      # @api private
      class Task
        # Ports made from a job's number: below those that systems give to connections, and none that torchrun uses.
        # Neighbouring jobs, and the steps of one, are far apart: the factor is the golden section of the prime.
        FIRST_PORT = 10_300
        PORTS = 18_979
        SPREAD = 11_730

        attr_reader :rank, :world_size, :local_rank, :local_world_size

        # @param env [Hash{String => String}]
        # @raise [ArgumentError] naming the variable that is missing or wrong
        def initialize(env)
          @env = env
          read
          return if @world_size.positive? && @rank.between?(0, @world_size - 1)

          raise ArgumentError, "#{launcher} says that this process is number #{@rank} of #{@world_size}: expected 0 to " \
            "#{@world_size - 1}. Set RANK and WORLD_SIZE if it is wrong"
        end

        # @return [Hash{String => String}] who this process is, in PyTorch's words
        def variables
          {"RANK" => rank, "WORLD_SIZE" => world_size, "LOCAL_RANK" => local_rank, "LOCAL_WORLD_SIZE" => local_world_size}
            .compact.transform_values(&:to_s)
        end

        # @return [String] where the others reach rank 0
        # @raise [ArgumentError] saying how to set MASTER_ADDR where this cannot be known
        def master_addr
          (local_world_size == world_size) ? Rendezvous.loopback : host_of_rank_zero
        end

        private

        # The first of these variables that is set.
        def number(*names)
          name = names.find { |each| !@env[each].to_s.empty? }
          unless name
            raise ArgumentError, "#{launcher} started this process (#{self.class::SIGN} is #{@env[self.class::SIGN]}), but " \
              "#{names.join(", ")} #{(names.size == 1) ? "is" : "are"} not set: start it with #{self.class::COMMAND} itself, or set " \
              "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
          end

          Schedulers.whole(name, @env[name])
        end

        def number_if_set(*names)
          number(*names) if names.any? { |name| !@env[name].to_s.empty? }
        end

        def port_of(job, step = 0)
          FIRST_PORT + ((job * SPREAD) + step) % PORTS
        end

        def unknown_host(why)
          raise ArgumentError, "MASTER_ADDR is not set, and #{launcher} does not say where rank 0 runs: #{why}. Set MASTER_ADDR to " \
            "the host of rank 0, for instance by #{self.class::SETTING}"
        end
      end
    end
  end
end
