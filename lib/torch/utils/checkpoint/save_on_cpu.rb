# frozen_string_literal: true

module Torch
  module Utils
    module Checkpoint
      # Around the `call` of a module, once prepended to its singleton class.
      #
      # @api private
      module OffloadedCall
        def call(*args, **kwargs, &block)
          Checkpoint.save_on_cpu(pin_memory: true) { super(*args, **kwargs, &block) }
        end
      end
      private_constant :OffloadedCall

      class << self
        # Activation offload: what operations in the block save for backward on a GPU is moved to the CPU's memory, and back when
        # backward needs it. PyTorch's torch.autograd.graph.save_on_cpu; it is here beside {.checkpoint}, with which it may be
        # combined: the inputs that checkpointed segments keep are moved, too.
        #
        #   loss = Torch::Utils::Checkpoint.save_on_cpu(pin_memory: true) { criterion.call(model.call(x), y) }
        #   loss.backward
        #
        # Parameters and floating-point inputs stay where they are, also parameters that are frozen or sharded; and so does everything
        # on the CPU, where the block only runs. Only what this thread does in the block counts. Autograd's engine is replaced for it, once for the process, by one
        # that is the same in all else.
        #
        # @param pin_memory [Boolean] whether the CPU's memory is page-locked: then the process does not wait for the copies
        # @return [Object] the block's value
        # @raise [ArgumentError] without a block, or if `pin_memory` is neither true nor false
        # @raise [Torch::Distributed::UnsupportedError] if another library has replaced autograd's engine
        def save_on_cpu(pin_memory: false, &block)
          raise ArgumentError, "save_on_cpu: expected a block" unless block
          raise ArgumentError, "pin_memory: expected true or false, got #{pin_memory.inspect}" unless [true, false].include?(pin_memory)

          _save_on_cpu(pin_memory, &block)
        end

        # Makes each call of a module one within {.save_on_cpu}, with page-locked memory. PyTorch's function of this name wraps the
        # module; here it stays the same object, with the same names in its state.
        #
        #   model.layers.each { |layer| Torch::Utils::Checkpoint.offload_wrapper(layer) }
        #
        # @param mod [Torch::NN::Module]
        # @return [Torch::NN::Module] `mod`
        # @raise [TypeError] if it is no module
        def offload_wrapper(mod)
          raise TypeError, "module: expected a Torch::NN::Module, got #{mod.inspect}" unless mod.is_a?(Torch::NN::Module)

          mod.singleton_class.prepend(OffloadedCall)
          mod
        end
      end
    end
  end
end
