# frozen_string_literal: true

module Torch
  module Distributed
    module Tensor
      # This process has an equal part of a tensor along one dimension.
      class Shard
        # @return [Integer] negative ones count from the end
        attr_reader :dim

        # @param dim [Integer]
        def initialize(dim)
          raise ArgumentError, "dim: expected an Integer, got #{dim.inspect}" unless dim.is_a?(Integer)

          @dim = dim
        end

        # @return [Boolean]
        def ==(other)
          other.is_a?(Shard) && other.dim == dim
        end
        alias_method :eql?, :==

        # @return [Integer] equal for those that are equal
        def hash
          [Shard, dim].hash
        end

        # @return [String]
        def inspect
          "shard(#{dim})"
        end
        alias_method :to_s, :inspect
      end

      # Every process has all of a tensor.
      class Replicate
        # @return [Symbol, nil]
        attr_reader :gradient

        # @param gradient [Symbol, nil] nil: all processes compute the same from the tensor, and have the same gradient;
        #   :partial: each computes its part, and its gradient is a summand of the tensor's
        def initialize(gradient: nil)
          unless [nil, :partial].include?(gradient)
            raise ArgumentError, "gradient: expected nil or :partial, got #{gradient.inspect}"
          end

          @gradient = gradient
        end

        # @return [Boolean]
        def ==(other)
          other.is_a?(Replicate) && other.gradient == gradient
        end
        alias_method :eql?, :==

        # @return [Integer] equal for those that are equal
        def hash
          [Replicate, gradient].hash
        end

        # @return [String]
        def inspect
          gradient ? "replicate(gradient: #{gradient.inspect})" : "replicate"
        end
        alias_method :to_s, :inspect
      end

      class << self
        # @return [Shard]
        # @see Shard#initialize
        def shard(dim)
          Shard.new(dim)
        end

        # @return [Replicate]
        # @see Replicate#initialize
        def replicate(gradient: nil)
          Replicate.new(gradient: gradient)
        end
      end
    end
  end
end
