# frozen_string_literal: true

require "torch/distributed/nested"

module Torch
  module NN
    module Parallel
      class DistributedDataParallel < Module
        # Replaces a module's parameters by casts of them while it runs.
        #
        # @api private
        class Casts
          # For modules whose parameters are cast: `module.weight` and `module.parameters` give the casts meanwhile.
          module Cast
            CASTS = :@_ddp_casts

            def named_parameters(prefix: "", recurse: true)
              casts = instance_variable_get(CASTS)
              named = super
              casts&.each { |name, cast| named["#{prefix}#{name}"] = cast }
              named
            end
          end
          private_constant :Cast

          # Where Torch::Utils::Checkpoint looks for what has to be `during` a segment's second run, too.
          SURROUNDINGS = :torch_ddp_surroundings

          # In these libtorch normalizes batches with statistics in float32, too.
          HALVES = %i[float16 bfloat16].freeze
          private_constant :HALVES

          class << self
            # @param mod [Torch::NN::BatchNorm]
            # @return [Symbol, nil] the dtype of its statistics; nil: it has none
            def statistics_dtype(mod)
              mod.named_buffers.each_value.find { |buffer| buffer.is_a?(Torch::Tensor) && buffer.floating_point? }&.dtype
            end

            # @raise [ArgumentError] naming a batch normalization whose statistics do not fit what it will be given
            def check(mod, precision)
              wanted = precision.param_dtype || return
              ignored = Parameters.ignored(mod)
              mod.named_modules.each do |name, each|
                next unless each.is_a?(BatchNorm)

                cast = precision.buffer_dtype unless ignored.include?(name.empty? ? "running_mean" : "#{name}.running_mean")
                dtype = statistics_dtype(each) && (cast || statistics_dtype(each))
                next if dtype.nil? || dtype == wanted || (HALVES.include?(wanted) && dtype == :float32)

                raise ArgumentError, "mixed_precision: param_dtype: #{wanted.inspect} does not fit the #{each.class}#{" #{name.inspect}" unless name.empty?}, " \
                  "whose statistics are in #{dtype.inspect}: expected them in #{wanted.inspect} as well, with buffer_dtype: #{wanted.inspect}"
              end
            end
          end

          # @param mod [Torch::NN::Module]
          # @param precision [MixedPrecision]
          def initialize(mod, precision)
            @module = mod
            @dtype = precision.param_dtype
            @inputs = precision.cast_forward_inputs? ? @dtype : nil
            cast_buffers(precision.buffer_dtype) if precision.buffer_dtype
          end

          # @return [Object] the arguments, with their floating-point tensors cast
          def inputs(value)
            @inputs ? Torch::Distributed::Nested.map(value) { |tensor| cast(tensor, @inputs) } : value
          end

          # Runs the block while the casts are in place. A checkpointed segment within it has them again when it runs in backward.
          def during
            return yield unless @dtype

            taken = []
            before = Thread.current[SURROUNDINGS]
            begin
              Thread.current[SURROUNDINGS] = self
              replace(taken)
              yield
            ensure
              taken.reverse_each(&:call)
              Thread.current[SURROUNDINGS] = before
            end
          end

          private

          def cast(tensor, dtype)
            (tensor.floating_point? && tensor.dtype != dtype) ? tensor.to(dtype: dtype) : tensor
          end

          # One cast for a parameter that has several places.
          def replace(taken)
            ignored = Parameters.ignored(@module).to_h { |name| [name, true] }
            casts = {}.compare_by_identity
            @module.named_modules.each do |prefix, mod|
              path = prefix.empty? ? "" : "#{prefix}."
              named = {}
              dtype = dtype_for(mod)
              places(mod) do |name, parameter, put|
                next if ignored["#{path}#{name}"]

                made = (casts[parameter] ||= cast(parameter, dtype))
                next if made.equal?(parameter)

                named[name] = made
                taken << -> { put.call(parameter) }
                put.call(made)
              end
              announce(mod, named, taken) unless named.empty?
            end
          end

          # libtorch normalizes batches of a smaller dtype, but wants parameters and statistics in one.
          def dtype_for(mod)
            return @dtype unless mod.is_a?(BatchNorm)

            Casts.statistics_dtype(mod) || @dtype
          end

          # Yields each name, its parameter, and what puts another tensor there.
          def places(mod)
            mod.instance_variables.each do |key|
              parameter = mod.instance_variable_get(key)
              next unless parameter.is_a?(Parameter)

              yield key.to_s.delete_prefix("@"), parameter, ->(tensor) { mod.instance_variable_set(key, tensor) }
            end
            registered = mod.instance_variable_get(:@parameters)
            registered.to_a.each do |name, parameter|
              yield name, parameter, ->(tensor) { registered[name] = tensor } if parameter.is_a?(Parameter)
            end
          end

          def announce(mod, named, taken)
            mod.extend(Cast) unless mod.singleton_class.include?(Cast)
            mod.instance_variable_set(Cast::CASTS, named)
            taken << -> { mod.instance_variable_set(Cast::CASTS, nil) }
          end

          def cast_buffers(dtype)
            ignored = Parameters.ignored(@module).to_h { |name| [name, true] }
            casts = {}.compare_by_identity
            @module.named_modules.each do |prefix, mod|
              mod.named_buffers.to_a.each do |name, buffer|
                next if !buffer.is_a?(Torch::Tensor) || ignored[prefix.empty? ? name : "#{prefix}.#{name}"]

                made = (casts[buffer] ||= cast(buffer, dtype))
                mod.instance_variable_get(:@buffers)[name] = made
                mod.instance_variable_set("@#{name}", made)
              end
            end
          end
        end
        private_constant :Casts
      end
    end
  end
end
