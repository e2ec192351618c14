# frozen_string_literal: true

module Torch
  module Distributed
    module Tensor
      module Parallel
        # From one placement of a tensor to another, forwards and, for its gradient, backwards.
        #
        # @api private
        module Redistribution
          class << self
            # @param place [Object] for messages
            # @param tensor [Torch::Tensor] what this process has of it
            # @param from [Shard, Replicate]
            # @param to [Shard, Replicate]
            # @param group [ProcessGroup]
            # @return [Torch::Tensor]
            def call(place, tensor, from, to, group)
              return tensor if group.size == 1 || from == to

              source, target = [from, to].map { |placement| dimension(place, tensor, placement) }
              return tensor if source && source == target
              return collect(tensor, source, to, group) if source && !target

              tensor = NN.gather_from_region(tensor, dim: source, group: group) if source
              return NN.copy_to_region(tensor, group: group) unless target

              divide(place, tensor, target, from, group)
            end

            # @param place [Object] for messages
            # @return [Integer, nil] the dimension, counted from the first; nil: it is not divided
            # @raise [ArgumentError] if the tensor has no such dimension
            def dimension(place, tensor, placement)
              return unless placement.is_a?(Shard)
              return placement.dim % tensor.dim if placement.dim.between?(-tensor.dim, tensor.dim - 1)

              raise ArgumentError, "#{place}: #{placement}: expected a tensor with this dimension, got one of shape #{tensor.shape}"
            end

            # @raise [ArgumentError] naming both numbers, if the processes cannot share a dimension evenly
            def check(place, tensor, dim, group)
              return if (tensor.shape[dim] % group.size).zero?

              raise ArgumentError, "#{place}: dimension #{dim} of a tensor of shape #{tensor.shape}: expected a multiple of " \
                "#{group.size} processes, got #{tensor.shape[dim]}"
            end

            private

            def collect(tensor, dim, to, group)
              return NN.gather_to_region(tensor, dim: dim, group: group) if to.gradient

              NN.gather_from_region(tensor, dim: dim, group: group)
            end

            # Within a region a process's gradient of the other parts is none.
            def divide(place, tensor, dim, from, group)
              check(place, tensor, dim, group)
              return NN.scatter_to_region(tensor, dim: dim, group: group) unless from.is_a?(Replicate) && from.gradient

              part = tensor.shape[dim] / group.size
              tensor.narrow(dim, group.rank * part, part)
            end
          end
        end
        private_constant :Redistribution
      end
    end
  end
end
