# frozen_string_literal: true

module Torch
  module Utils
    module Checkpoint
      class << self
        # Divides a chain of functions into segments and checkpoints all but the last one, which backward needs first.
        #
        #   output = Torch::Utils::Checkpoint.checkpoint_sequential(model.layers, 4, input)
        #
        # @param functions [Torch::NN::Sequential, Torch::NN::ModuleList, Array<#call>] each is called with the result of the
        #   one before it
        # @param segments [Integer] 1 to the number of functions
        # @param input [Object] the first function's argument
        # @param preserve_rng_state [Boolean] as for {.checkpoint}
        # @param use_reentrant [Boolean, nil] as for {.checkpoint}
        # @raise [ArgumentError] if there are no functions, or not as many segments as there can be
        # @return [Object] the last function's result
        def checkpoint_sequential(functions, segments, input, preserve_rng_state: true, use_reentrant: nil)
          steps = chain_of(functions)
          unless segments.is_a?(Integer) && segments.between?(1, steps.size)
            raise ArgumentError, "segments: expected an Integer from 1 to #{steps.size}, the number of functions, got #{segments.inspect}"
          end

          size = steps.size / segments
          checkpointed = steps.first(size * (segments - 1))
          input = checkpointed.each_slice(size).inject(input) do |x, slice|
            checkpoint(run_of(slice), x, preserve_rng_state: preserve_rng_state, use_reentrant: use_reentrant)
          end
          run_of(steps.drop(checkpointed.size)).call(input)
        end

        private

        def chain_of(functions)
          steps = case functions
          when Torch::NN::Sequential, Torch::NN::ModuleList then functions.children
          when Array then functions
          else raise ArgumentError, "functions: expected a Torch::NN::Sequential, a Torch::NN::ModuleList or an Array, got #{functions.inspect}"
          end
          raise ArgumentError, "functions: expected at least one, got none" if steps.empty?

          steps.each_with_index do |step, i|
            raise ArgumentError, "functions: expected objects with a method `call`, got #{step.inspect} at #{i}" unless step.respond_to?(:call)
          end
        end

        # Made here, so that it holds no variable but the functions.
        def run_of(steps)
          ->(input) { steps.inject(input) { |x, step| step.call(x) } }
        end
      end
    end
  end
end
