# frozen_string_literal: true

module Torch
  module Distributed
    module FSDP
      DTYPES = %i[float16 bfloat16 float32 float64].freeze
      private_constant :DTYPES

      # In which dtypes a unit computes and its gradients are reduced. The parameters that the optimizer has, and their
      # gradients, keep their own.
      class MixedPrecisionPolicy
        # @return [Symbol, nil]
        attr_reader :param_dtype, :reduce_dtype, :output_dtype

        # @param param_dtype [Symbol, nil] in which parameters are gathered and forward and backward computed; nil: their own
        # @param reduce_dtype [Symbol, nil] in which gradients are kept until they are reduced; nil: `param_dtype`
        # @param output_dtype [Symbol, nil] to which floating-point outputs of the unit are cast; nil: they are left
        # @param cast_forward_inputs [Boolean] whether floating-point inputs are cast to `param_dtype`
        def initialize(param_dtype: nil, reduce_dtype: nil, output_dtype: nil, cast_forward_inputs: true)
          @param_dtype = dtype("param_dtype", param_dtype)
          @reduce_dtype = dtype("reduce_dtype", reduce_dtype)
          @output_dtype = dtype("output_dtype", output_dtype)
          @cast_forward_inputs = cast_forward_inputs
        end

        # @return [Boolean]
        def cast_forward_inputs?
          @cast_forward_inputs
        end

        private

        def dtype(name, value)
          return if value.nil?
          raise ArgumentError, "#{name}: expected one of #{DTYPES.inspect} or nil, got #{value.inspect}" unless DTYPES.include?(value.to_sym)

          value.to_sym
        end
      end

      # Where a unit's shards, their gradients and the optimizer's state are: on the device of its parameters.
      class OffloadPolicy
      end

      # In the CPU's memory. A shard is copied to the device before its unit is gathered, and its gradient to the CPU after it was
      # reduced, both beside what the device computes; outside of forward and backward the parameters are on the CPU, and so an
      # optimizer steps there. Where the parameters are on the CPU already this changes nothing, as in PyTorch.
      class CPUOffloadPolicy < OffloadPolicy
        # @param pin_memory [Boolean] whether the shards' memory is page-locked: then copies are faster, and the process need not
        #   wait for them; but the system can't use that memory for anything else
        def initialize(pin_memory: true)
          super()
          raise ArgumentError, "pin_memory: expected true or false, got #{pin_memory.inspect}" unless [true, false].include?(pin_memory)

          @pin_memory = pin_memory
        end

        # @return [Boolean]
        def pin_memory?
          @pin_memory
        end
      end

      # Which parts of a model become units of their own, for `auto_wrap_policy:` of {FullyShardedDataParallel}. A policy is called
      # with each module of the model and its name, and with the number of elements that its parameters have which are in
      # no unit yet; it says whether the module becomes a unit. Parts are asked before the whole.
      module WrapPolicies
        class << self
          # Modules of these classes.
          #
          # @param classes [Class, Array<Class>]
          # @return [Proc]
          def module_wrap_policy(*classes)
            classes = classes.flatten
            unless !classes.empty? && classes.all?(Class)
              raise ArgumentError, "classes: expected classes of modules, got #{classes.inspect}"
            end

            ->(mod, _name, _count) { classes.any? { |each| mod.is_a?(each) } }
          end
          alias_method :transformer_auto_wrap_policy, :module_wrap_policy

          # Modules with at least so many elements.
          #
          # @param min_num_params [Integer]
          # @return [Proc]
          def size_based_auto_wrap_policy(min_num_params: 100_000_000)
            unless min_num_params.is_a?(Integer) && min_num_params.positive?
              raise ArgumentError, "min_num_params: expected a positive Integer, got #{min_num_params.inspect}"
            end

            ->(_mod, _name, count) { count >= min_num_params }
          end
        end
      end
    end
  end
end
