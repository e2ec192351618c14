# frozen_string_literal: true

require "torch"
require "torch_ddp/ext"
require_relative "../distributed/errors"
require_relative "../distributed/nested"
require_relative "../distributed/random_streams"
require_relative "../distributed/step_memory"

module Torch
  module Utils
    # Activation checkpointing: trades computing for memory.
    #
    #   hidden = Torch::Utils::Checkpoint.checkpoint(@block, hidden)
    #   output = Torch::Utils::Checkpoint.checkpoint(hidden) { |x| @second.call(@first.call(x)) }
    #
    # A checkpointed segment keeps its inputs, but none of what it computes on the way; in backward it runs once more,
    # with grad. Under DistributedDataParallel each parameter may be used in one segment, or outside of them; with
    # `static_graph: true` also in several. Backward on a GPU runs on threads of libtorch's, where no Ruby can: there it raises.
    module Checkpoint
      autoload :SelectiveCheckpointing, "torch/utils/checkpoint/selective"

      # A segment between forward and backward.
      #
      # @api private
      class Segment
      end

      class << self
        # Runs a segment of a model now without a graph, and once more in backward. It must compute the same both
        # times, from its arguments and from parameters; a block should not assign variables outside of it.
        #
        #   x = checkpoint(layer, x)
        #   x = checkpoint(x) { |input| second.call(first.call(input)) }
        #
        # A module is the better choice where there is one. A block keeps all local variables of the place where it is
        # written, and so, in the second line, its own result. Backward over the segment releases the block. Where no
        # backward will run over it, give such variables another value (`x = nil`), or use `Torch.no_grad`: else what they
        # hold stays in memory, also when the surrounding method has returned.
        #
        # @overload checkpoint(function, *args, preserve_rng_state: true, use_reentrant: nil, **kwargs)
        #   @param function [#call] a module, a lambda ...
        # @overload checkpoint(*args, preserve_rng_state: true, use_reentrant: nil, **kwargs, &block)
        # @param args [Array<Object>] the function's arguments; tensors in them, also nested ones, get gradients
        # @param preserve_rng_state [Boolean] whether the second run draws the same random numbers as the first, as
        #   dropout must; what follows is not changed by it
        # @param use_reentrant [Boolean, nil] for PyTorch's sake: there is one implementation here, without effect on results
        # @param kwargs [Hash<Symbol, Object>] the function's keyword arguments
        # @return [Object] the function's result; its floating point tensors, also nested ones, require grad
        def checkpoint(*args, preserve_rng_state: true, use_reentrant: nil, **kwargs, &block)
          unless [nil, true, false].include?(use_reentrant)
            raise ArgumentError, "use_reentrant: expected true, false or nil, got #{use_reentrant.inspect}"
          end

          function = block || args.shift
          unless function.respond_to?(:call)
            raise ArgumentError, "checkpoint: expected a module, another object with a method `call`, or a block, " \
              "got #{function.inspect}"
          end
          return function.call(*args, **kwargs) unless Torch.grad_enabled?

          segment = Segment._begin(Torch::Distributed::Nested.tensors([args, kwargs]), preserve_rng_state,
            second_run(function, args, kwargs, preserve_rng_state ? Torch::Distributed::RandomStreams.snapshot : nil))
          tie(segment, memory.segment { Torch.no_grad { function.call(*args, **kwargs) } })
        end

        private

        # Made here, so that it holds no variable of the caller's.
        #
        # @param streams [Proc, nil] those that are beside libtorch's own random numbers
        def second_run(function, args, kwargs, streams)
          surroundings = Thread.current[:torch_ddp_surroundings]
          memory = self.memory
          lambda do |tensors|
            again, options = Torch::Distributed::Nested.map([args, kwargs]) { tensors.shift }
            run = -> { streams ? streams.call { function.call(*again, **options) } : function.call(*again, **options) }
            # Mixed precision, for instance, is over when backward begins.
            Torch::Distributed::Nested.tensors(memory.segment { surroundings ? surroundings.during(&run) : run.call })
          end
        end

        # Else what a segment computes on the way would remain until Ruby collects it.
        def memory
          Torch::Distributed::StepMemory.instance
        end

        def tie(segment, result)
          outputs = segment.outputs(Torch::Distributed::Nested.outputs(result, "a checkpointed segment"))
          Torch::Distributed::Nested.map(result) { outputs.shift }
        end
      end
    end
  end
end

require_relative "checkpoint/save_on_cpu"
require_relative "checkpoint/sequential"
