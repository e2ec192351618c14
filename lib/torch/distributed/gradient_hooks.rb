# frozen_string_literal: true

module Torch
  module Distributed
    # Averages of single gradients.
    module GradientHooks
      # From now on backward leaves in the gradient of `tensor` the sum over the ranks of what it computed there, divided by
      # `world_size`. Every rank waits for the others once for each such tensor, in the order in which backward comes to them:
      # {Torch::NN::Parallel::DistributedDataParallel} sends many gradients together, while backward goes on.
      #
      # @param tensor [Torch::Tensor] a parameter, which requires a gradient
      # @param process_group [ProcessGroup, nil] nil: the default group
      # @param world_size [Integer] the divisor
      # @return [Integer] the hook's number
      # @raise [ArgumentError] for a tensor without a gradient, or a `world_size` below 1
      # @raise [GroupError] without a group
      def register_ddp_hook(tensor, process_group, world_size)
        return unless (group = member_group(process_group, "register_ddp_hook"))

        check_tensor("tensor", tensor)
        raise ArgumentError, "tensor: expected one that requires a gradient" unless tensor.requires_grad
        unless world_size.is_a?(Integer) && world_size.positive?
          raise ArgumentError, "world_size: expected a whole number from 1, got #{world_size.inspect}"
        end

        _average_gradient(tensor, group, world_size)
      end
    end
  end
end
