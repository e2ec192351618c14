# frozen_string_literal: true

module Torch
  module Distributed
    module Tensor
      # What each process of a group holds of a tensor: all of it, or an equal part along one dimension.
      #
      #   Layout.new(group, [4 * n, n], dim: 0)              # rows: process r of t has 4n/t of them, from r * 4n/t on
      #   Layout.new(group, [3 * n, n], dim: 0, blocks: 3)   # the same of each of three blocks: a fused query, key and value
      class Layout
        # @return [ProcessGroup]
        attr_reader :group

        # @return [Array<Integer>] of the whole tensor
        attr_reader :shape

        # @return [Integer, nil] the dimension that is divided; nil: each process has the whole tensor
        attr_reader :dim

        # @return [Integer] how many equal blocks the dimension consists of, each of which is divided
        attr_reader :blocks

        # @param group [ProcessGroup]
        # @param shape [Array<Integer>]
        # @param dim [Integer, nil]
        # @param blocks [Integer]
        # @raise [ArgumentError] naming both numbers, if the group's size does not divide the dimension
        def initialize(group, shape, dim: nil, blocks: 1)
          if dim && !(dim.is_a?(Integer) && dim.between?(-shape.size, shape.size - 1))
            raise ArgumentError, "dim: expected a dimension of the shape #{shape}, or nil, got #{dim.inspect}"
          end

          @group = group
          @shape = shape.dup.freeze
          @dim = dim && dim % shape.size
          @blocks = blocks
          return if dim.nil? || (shape[dim] % (blocks * group.size)).zero?

          raise ArgumentError, "dimension #{@dim} of the shape #{shape}: expected a multiple of " \
            "#{"#{blocks} blocks times " if blocks > 1}#{group.size} processes, got #{shape[dim]}"
        end

        # @return [Boolean] whether processes have different elements
        def divided?
          !@dim.nil? && @group.size > 1
        end

        # @return [Array<Integer>] of what a process holds
        def local_shape
          return @shape unless divided?

          @shape.each_with_index.map { |size, i| (i == @dim) ? size / @group.size : size }
        end

        # @param tensor [Torch::Tensor] the whole one
        # @return [Torch::Tensor] what this process holds of it, in memory of its own
        def take(tensor)
          return tensor.clone unless divided?

          rows = tensor.contiguous.view(-1, stride)
          rows.narrow(1, offset, width).clone.view(*local_shape)
        end

        # Puts a tensor together again. A collective call of the group.
        #
        # @param tensor [Torch::Tensor] what this process holds
        # @return [Torch::Tensor] the whole one
        def gather(tensor)
          return tensor.clone unless divided?

          parts = Array.new(@group.size) { Torch.empty(tensor.numel / width, width, dtype: tensor.dtype, device: tensor.device) }
          Distributed.all_gather(parts, tensor.detach.contiguous.view(-1, width), group: @group)
          Torch.cat(parts, 1).view(*@shape)
        end

        # In the whole tensor's flat order this process has `width` elements of every `stride`, from `offset` on.
        #
        # @return [Integer]
        def stride
          return total unless divided?

          @shape.drop(@dim).inject(:*) / @blocks
        end

        # @return [Integer]
        def width
          divided? ? stride / @group.size : stride
        end

        # @return [Integer]
        def offset
          divided? ? width * @group.rank : 0
        end

        # @return [Boolean] whether it divides the same shape in the same way over the same group
        def ==(other)
          other.is_a?(Layout) && other.identity == identity
        end
        alias_method :eql?, :==

        # @return [Integer] equal for layouts that are equal
        def hash
          identity.hash
        end

        # @return [String]
        def inspect
          divided? ? "shard(#{@dim})#{" of #{@blocks} blocks" if @blocks > 1} of #{@shape} over #{@group.size}" : "replicate of #{@shape}"
        end
        alias_method :to_s, :inspect

        protected

        def identity
          [group, shape, dim, blocks]
        end

        private

        def total
          @shape.inject(1, :*)
        end
      end
    end
  end
end
