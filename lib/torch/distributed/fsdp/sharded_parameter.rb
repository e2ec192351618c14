# frozen_string_literal: true

module Torch
  module Distributed
    module FSDP
      # What a parameter can do that {FSDP.fully_shard} has sharded. It answers as the model's parameter does, so that parameters are
      # chosen by their dimensions as without sharding: `dim`, `shape`, `size` and `numel` are those of the whole parameter at any
      # time. Its elements are those that this process holds: what is computed with it, its `grad` and an optimizer's state have the
      # shape of {#to_local}, which is whole only while the unit is gathered.
      module ShardedParameter
        include LocalPiece

        SHAPE = :@_model_shape
        private_constant :SHAPE

        class << self
          # @api private
          # @param parameter [Torch::NN::Parameter]
          # @param shape [Array<Integer>] before it was sharded
          def adopt(parameter, shape)
            parameter.instance_variable_set(SHAPE, shape.dup.freeze)
            LocalPiece.mark(parameter, shape) unless parameter.is_a?(LocalPiece) # of a layout
            parameter.extend(self)
          end
        end

        # @return [Torch::Tensor] what this process holds now: its piece, of one dimension, which may have no element; the whole parameter
        #   while the unit is gathered. The same memory and graph
        def to_local
          Distributed.send(:_same_tensors, [self]).first
        end

        # @return [Array<Integer>]
        def shape
          instance_variable_get(SHAPE).dup
        end

        # @param dim [Integer, nil]
        # @return [Integer, Array<Integer>]
        def size(dim = nil)
          dim ? shape.fetch(dim) : shape
        end

        # @return [Integer]
        def dim
          shape.size
        end
        alias_method :ndim, :dim
        alias_method :ndimension, :dim

        # @return [Integer]
        def numel
          shape.inject(1, :*)
        end

        # @return [Integer]
        def length
          size(0)
        end

        # @return [String]
        def inspect
          return super if LocalPiece.shape(self) == shape

          "Parameter of shape #{shape}, of which this process has #{LocalPiece.numel(self)} elements:\n#{to_local.inspect}"
        end
        alias_method :to_s, :inspect

        # Elements are those of {#to_local}: torch-rb reads them by the shape.
        #
        # @yieldparam element [Torch::Tensor]
        # @return [Enumerator, Object]
        def each(&block)
          to_local.each(&block)
        end

        # @return [Array] of {#to_local}
        def to_a
          to_local.to_a
        end

        # @return [Numeric, Boolean] of {#to_local}, which has one element
        def item
          to_local.item
        end

        # @return [Object] an array of the gem numo, of {#to_local}
        def numo
          to_local.numo
        end

        # @param other [Torch::Tensor]
        # @return [Integer, nil] as of {#to_local}
        def <=>(other)
          to_local <=> other
        end
      end
    end
  end
end
