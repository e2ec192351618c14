# frozen_string_literal: true

require "torch"
require "torch_ddp/ext"

module Torch
  module Distributed
    # Optimizers for distributed training.
    module Optim
      # What the fused optimizers share: a step of all parameters in one call, which reads and writes each number
      # once. torch-rb's own take some ten calls a parameter, and as many passes over memory.
      #
      # They are torch-rb's classes in all else: `param_groups` (so learning rate schedulers work), `state` with the
      # same keys, `state_dict`. Each step looks at them as they are then. Results equal torch-rb's to rounding, but
      # `weight_decay` leaves the gradients alone, as in PyTorch, where torch-rb adds to them.
      module Fused
        # Forgets all gradients in one call. The next `backward` then stores its own, which costs less than filling with
        # zeros and adding.
        #
        # @param set_to_none [Boolean] false: keep the gradients and fill them with zeros, as torch-rb's optimizers do
        # @return [void]
        def zero_grad(set_to_none: true)
          _zero_grad(@param_groups, set_to_none)
          nil
        end
      end

      # {https://pytorch.org/docs/stable/generated/torch.optim.SGD.html SGD} with or without momentum, fused.
      # The same as `Torch::Optim::SGD.new(params, lr: 0.1, fused: true)`.
      #
      # @see Fused
      class FusedSGD < Torch::Optim::SGD
        include Fused

        # Makes one step.
        #
        # @param closure [#call, nil] computes the loss anew
        # @return [Object, nil] what the closure returned
        def step(closure = nil)
          loss = closure&.call
          _sgd_step(@param_groups, @state)
          loss
        end
      end

      # Adam, fused. The same as `Torch::Optim::Adam.new(params, fused: true)`.
      #
      # @see Fused
      class FusedAdam < Torch::Optim::Adam
        include Fused

        # Makes one step.
        #
        # @param closure [#call, nil] computes the loss anew
        # @return [Object, nil] what the closure returned
        def step(closure = nil)
          loss = closure&.call
          _adam_step(@param_groups, @state, false)
          loss
        end
      end

      # AdamW, fused. The same as `Torch::Optim::AdamW.new(params, fused: true)`.
      #
      # @see Fused
      class FusedAdamW < Torch::Optim::AdamW
        include Fused

        # Makes one step.
        #
        # @param closure [#call, nil] computes the loss anew
        # @return [Object, nil] what the closure returned
        def step(closure = nil)
          loss = closure&.call
          _adam_step(@param_groups, @state, true)
          loss
        end
      end

      # Gives torch-rb's constructors the argument `fused:`, unless they have one of their own.
      #
      # @api private
      module FusedArgument
        FUSED = {Torch::Optim::SGD => FusedSGD, Torch::Optim::Adam => FusedAdam, Torch::Optim::AdamW => FusedAdamW}.freeze
        private_constant :FUSED

        def self.add
          FUSED.each_key do |plain|
            known = plain.instance_method(:initialize).parameters.any? { |_, name| name == :fused }
            plain.singleton_class.prepend(self) unless known
          end
        end

        # The fused class for `fused: true`; classes that users derived take their arguments as they are.
        def new(*arguments, **options, &block)
          return super if !options.key?(:fused) || !(FUSED.key?(self) || FUSED.value?(self))

          fused = options.delete(:fused)
          raise ArgumentError, "fused: expected true or false, got #{fused.inspect}" unless [true, false, nil].include?(fused)
          return super if !fused || FUSED.value?(self)

          FUSED.fetch(self).new(*arguments, **options, &block)
        end
      end

      FusedArgument.add
    end
  end
end
