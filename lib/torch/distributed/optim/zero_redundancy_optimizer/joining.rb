# frozen_string_literal: true

require "torch/distributed/algorithms/join"

module Torch
  module Distributed
    module Optim
      class ZeroRedundancyOptimizer < Torch::Optim::Optimizer
        # Uneven inputs: a rank that has none left goes on updating its range, with the gradients that the model's
        # DistributedDataParallel has averaged, which is another joinable of the same {Torch::Distributed::Algorithms::Join}, in front
        # of this one. One step belongs to each forward of the ranks that have inputs.
        #
        # @api private
        module Joining
          include Torch::Distributed::Algorithms::Joinable

          # What a rank without inputs does in each step of the others.
          class Hook < Torch::Distributed::Algorithms::JoinHook
            # @param optimizer [ZeroRedundancyOptimizer]
            def initialize(optimizer)
              super()
              @optimizer = optimizer
            end

            def main_hook
              @optimizer.send(:take_step, joined: true)
            end
          end
          private_constant :Hook

          # @return [Torch::Distributed::Algorithms::JoinHook]
          def join_hook(**)
            Hook.new(self)
          end

          def join_process_group
            @process_group
          end

          # @return [String, nil]
          def join_device
            device = Distributed._device_name(@lists.first.first.device)
            device unless device == "cpu"
          end

          private

          # Learning rates are those of ranks that still have inputs: the others' schedulers stand still. Gradients have to be there,
          # or the ranges of ranks without inputs would stay as they are.
          #
          # @raise [ArgumentError] on all ranks
          def agree_joined(joined)
            gradients = @param_groups.map { |group| group[:params].map { |param| !param.grad.nil? } }
            all = Distributed.all_gather_object([joined, @param_groups.map { |group| group.except(:params) }, gradients], group: @process_group)
            _, options, present = all.find { |through, *| !through }
            lacking = all.index { |through, _, theirs| through && lacks?(theirs.flatten, present.flatten) }
            if lacking
              raise ArgumentError, "step: rank #{lacking} has no inputs left, and not all gradients that the others have: expected the " \
                "DistributedDataParallel of all these parameters among the joinables, in front of the optimizer"
            end

            @param_groups.zip(options) { |group, theirs| group.merge!(theirs) } if joined
          end

          def lacks?(theirs, present)
            present.zip(theirs).any? { |wanted, there| wanted && !there }
          end
        end
        private_constant :Joining
      end
    end
  end
end
