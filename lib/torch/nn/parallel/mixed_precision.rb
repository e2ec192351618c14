# frozen_string_literal: true

module Torch
  module NN
    module Parallel
      # Runs a model in a smaller dtype than that of its parameters, which stay as they are for the optimizer.
      #
      #   precision = MixedPrecision.new(param_dtype: :bfloat16, reduce_dtype: :bfloat16)
      #   model = DistributedDataParallel.new(net, mixed_precision: precision)
      #
      # During forward the model's floating-point parameters are replaced by casts of them that autograd knows, so gradients
      # arrive in the parameters' own dtype. Those of batch normalization are cast to the dtype of its statistics, that is
      # `buffer_dtype`, instead: with `param_dtype: :float64` they need `buffer_dtype: :float64`. Outputs have the dtype that the model gives them. On the CPU libtorch
      # knows few operations in float16; bfloat16 is the one to take there.
      class MixedPrecision
        DTYPES = %i[float16 bfloat16 float32 float64].freeze
        COMPRESSED = %i[float16 bfloat16].freeze
        private_constant :DTYPES, :COMPRESSED

        # @return [Symbol, nil]
        attr_reader :param_dtype, :reduce_dtype, :buffer_dtype

        # @param param_dtype [Symbol, nil] what forward and backward are computed in; nil: each parameter's own dtype
        # @param reduce_dtype [Symbol, nil] what gradients are sent as, `:float16` or `:bfloat16` for half of the bytes; nil, or
        #   the parameters' own dtype: as they are
        # @param buffer_dtype [Symbol, nil] what floating-point buffers are cast to, once and for good; nil: not at all
        # @param keep_low_precision_grads [Boolean] false, the only possibility: a gradient has its parameter's dtype
        # @param cast_forward_inputs [Boolean] whether floating-point inputs are cast to `param_dtype`
        # @raise [ArgumentError]
        def initialize(param_dtype: nil, reduce_dtype: nil, buffer_dtype: nil, keep_low_precision_grads: false,
          cast_forward_inputs: true)
          @param_dtype = dtype("param_dtype", param_dtype)
          @reduce_dtype = dtype("reduce_dtype", reduce_dtype)
          @buffer_dtype = dtype("buffer_dtype", buffer_dtype)
          @cast_forward_inputs = cast_forward_inputs ? true : false
          if keep_low_precision_grads
            raise ArgumentError, "keep_low_precision_grads: expected false, got #{keep_low_precision_grads.inspect}: a gradient has its " \
              "parameter's dtype; for smaller gradients convert the model, model.to(:bfloat16)"
          end
          freeze
        end

        # @return [Boolean]
        def cast_forward_inputs?
          @cast_forward_inputs
        end

        # @api private
        # @param parameters [Array<Torch::NN::Parameter>] those that train
        def check(parameters)
          return if @reduce_dtype.nil? || COMPRESSED.include?(@reduce_dtype)

          other = parameters.find { |parameter| parameter.dtype != @reduce_dtype }
          return unless other

          raise ArgumentError, "mixed_precision: reduce_dtype: expected :float16, :bfloat16 or the parameters' own dtype, " \
            "got #{@reduce_dtype.inspect} for a model with parameters in #{other.dtype.inspect}"
        end

        # @api private
        # @return [Symbol, nil] the dtype that buckets are compressed to
        def compress
          @reduce_dtype if COMPRESSED.include?(@reduce_dtype)
        end

        private

        def dtype(name, given)
          return if given.nil?

          dtype = given.to_s.delete_prefix("torch.").to_sym
          dtype = {half: :float16, float: :float32, double: :float64}.fetch(dtype, dtype)
          return dtype if DTYPES.include?(dtype)

          raise ArgumentError, "#{name}: expected one of #{DTYPES.map(&:inspect).join(", ")} or nil, got #{given.inspect}"
        end
      end
    end
  end
end
