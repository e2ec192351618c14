# frozen_string_literal: true

module Torch
  module Distributed
    module Algorithms
      module DDPCommHooks
        # How PowerSGD compresses.
        class PowerSGDState
          # @return [Hash] as they were given
          attr_reader :options

          # @param matrix_approximation_rank [Integer] of the two matrices that stand for a gradient
          # @param start_powerSGD_iter [Integer] how many iterations are averaged as they are first
          # @param min_compression_rate [Numeric] a gradient that would not become smaller by this factor is sent as it is
          # @param use_error_feedback [Boolean] whether what was lost is added to the next iteration's gradients
          # @param warm_start [Boolean] whether to begin with the last iteration's matrices
          # @param orthogonalization_epsilon [Numeric] added to the lengths that columns are divided by
          # @param random_seed [Integer] the same on all processes
          # @param process_group [ProcessGroup, nil] for PyTorch's sake: nil, or the model's group
          # @raise [ArgumentError]
          def initialize(process_group: nil, matrix_approximation_rank: 1, start_powerSGD_iter: 1000, start_power_sgd_iter: nil, # rubocop:disable Naming/VariableName
            min_compression_rate: 2, use_error_feedback: true, warm_start: true, orthogonalization_epsilon: 0, random_seed: 0)
            @process_group = process_group
            @options = {
              rank: integer("matrix_approximation_rank", matrix_approximation_rank, 1),
              start_iteration: integer("start_power_sgd_iter", start_power_sgd_iter || start_powerSGD_iter, 0), # rubocop:disable Naming/VariableName
              min_compression_rate: number("min_compression_rate", min_compression_rate),
              error_feedback: use_error_feedback ? true : false,
              warm_start: warm_start ? true : false,
              orthogonalization_epsilon: number("orthogonalization_epsilon", orthogonalization_epsilon),
              seed: integer("random_seed", random_seed, 0)
            }.freeze
          end

          # @api private
          # @param group [ProcessGroup, nil] of a model on devices
          # @return [CommHook]
          def _hook(batched, rounds, group)
            options = @options.merge(start_iteration: [@options[:start_iteration] - rounds, 0].max)
            group ? CommHook.ruby(PowerSGD.new(options, batched, group)) : CommHook.power_sgd(options.merge(batched: batched))
          end

          private

          def integer(name, value, least)
            return value if value.is_a?(Integer) && value >= least

            raise ArgumentError, "#{name}: expected an Integer of at least #{least}, got #{value.inspect}"
          end

          def number(name, value)
            return value.to_f if value.is_a?(Numeric) && value.real? && value >= 0

            raise ArgumentError, "#{name}: expected a number of at least 0, got #{value.inspect}"
          end
        end

        # When averaging over all processes ends, and over which it goes on.
        class PostLocalSGDState
          # @return [Integer]
          attr_reader :start_local_sgd_iter

          # @return [ProcessGroup, nil]
          attr_reader :subgroup

          # Without a `subgroup` a collective call: it makes one of the processes of each machine.
          #
          # @param process_group [ProcessGroup, nil] for PyTorch's sake: nil, or the model's group
          # @param subgroup [ProcessGroup, nil] the processes with which this one goes on to average gradients; nil: those of
          #   the same machine
          # @param start_local_sgd_iter [Integer] how many iterations are averaged over all processes first
          # @param post_local_gradient_allreduce [Boolean] whether gradients are averaged over the subgroup after that;
          #   false: not at all
          # @raise [ArgumentError]
          def initialize(process_group: nil, subgroup: nil, start_local_sgd_iter: 100, post_local_gradient_allreduce: true)
            unless start_local_sgd_iter.is_a?(Integer) && !start_local_sgd_iter.negative?
              raise ArgumentError, "start_local_sgd_iter: expected an Integer of at least 0, got #{start_local_sgd_iter.inspect}"
            end
            unless subgroup.nil? || subgroup.is_a?(ProcessGroup)
              raise ArgumentError, "subgroup: expected a Torch::Distributed::ProcessGroup or nil, got #{subgroup.inspect}"
            end

            @process_group = process_group
            @start_local_sgd_iter = start_local_sgd_iter
            @allreduce = post_local_gradient_allreduce ? true : false
            @subgroup = subgroup || (machine if @allreduce)
          end

          # @api private
          # @return [CommHook]
          def _hook(rounds)
            CommHook.post_local_sgd(@subgroup, [@start_local_sgd_iter - rounds, 0].max, @allreduce)
          end

          private

          # As torchrun counts its processes; without it all are taken to be on one machine.
          def machine
            Distributed.new_subgroups(ENV["LOCAL_WORLD_SIZE"] ? nil : Distributed.get_world_size).first
          end
        end
      end
    end
  end
end
