# frozen_string_literal: true

module Torch
  module Distributed
    class MemoryEstimate
      # In which dtypes a model computes and its gradients are reduced, as bytes of an element.
      #
      # @api private
      class Precision
        BYTES = {float16: 2, bfloat16: 2, float32: 4, float64: 8}.freeze

        # @return [Symbol, nil]
        attr_reader :param_dtype

        # @param given [FSDP::MixedPrecisionPolicy, Torch::NN::Parallel::MixedPrecision, Symbol, String, nil]
        # @raise [ArgumentError]
        def initialize(given)
          given = FSDP::MixedPrecisionPolicy.new(param_dtype: given.to_sym) if BYTES.key?(given.to_s.to_sym)
          unless [NilClass, FSDP::MixedPrecisionPolicy, Torch::NN::Parallel::MixedPrecision].any? { |each| given.is_a?(each) }
            raise ArgumentError, "mixed_precision: expected an FSDP::MixedPrecisionPolicy, one of #{BYTES.keys.inspect}, or nil, got #{given.inspect}"
          end

          @given = given
          @param_dtype = given&.param_dtype
        end

        # @param policy [FSDP::MixedPrecisionPolicy, nil] of a unit that is there already
        # @param own [Integer] bytes of the parameters' elements
        # @return [Integer] bytes of a gathered element
        def gathered(policy, own)
          BYTES.fetch((policy || @given)&.param_dtype, own)
        end

        # @return [Integer] bytes of a gradient's element, until it is reduced
        def reduced(policy, own)
          BYTES.fetch((policy || @given)&.reduce_dtype, gathered(policy, own))
        end
      end
      private_constant :Precision
    end
  end
end
