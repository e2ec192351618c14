# frozen_string_literal: true

module Torch
  module Distributed
    # A communication hook of libtddp: what {Algorithms::DDPCommHooks} makes.
    #
    # @api private
    class CommHook; end

    # The gradients of one DistributedDataParallel, in buckets.
    #
    # @api private
    class GradientSync; end

    # A bucket of gradients, as passed to a communication hook in Ruby.
    #
    # @!method index
    #   @return [Integer] its place: buckets are handed over in this order
    # @!method iteration
    #   @return [Integer] how many backwards were averaged before this one
    # @!method last?
    #   @return [Boolean] whether it is the last one of this backward
    # @!method buffer
    #   @return [Torch::Tensor] all gradients in a row, with the padding between them, which is zero. It is the bucket's own memory: what is
    #     written there is what gradients become, unless the hook returns another tensor.
    # @!method buffer=(tensor)
    #   @param tensor [Torch::Tensor] whose elements become the bucket's
    # @!method gradients
    #   @return [Array<Torch::Tensor>] each gradient in its parameter's shape, in the same memory
    # @!method parameter_indices
    #   @return [Array<Integer>] the numbers of their parameters
    class GradBucket
      alias_method :is_last, :last?
      alias_method :set_buffer, :buffer=

      # @return [Array<Torch::NN::Parameter>] those whose gradients it has, in the same order
      def parameters
        @parameters.values_at(*parameter_indices)
      end

      # @return [String]
      def inspect
        "#<#{self.class.name} #{index}#{" (last)" if last?}: #{gradients.size} gradients, #{buffer.numel} elements of #{buffer.dtype}>"
      end

      # @api private
      # @param parameters [Array<Torch::NN::Parameter>] all, by number
      def _of(parameters)
        @parameters = parameters
        self
      end
    end
  end
end
