# frozen_string_literal: true

require_relative "layers"

module Torch
  module Utils
    module Checkpoint
      # Checkpoints some of a model's layers: each of these keeps only its inputs in forward, and is computed again in
      # backward.
      #
      #   model = Torch::Utils::Checkpoint::SelectiveCheckpointing.new(model, ratio: 0.5)
      #   model = Torch::Utils::Checkpoint::SelectiveCheckpointing.new(model) { |name, layer| layer.is_a?(Block) }
      #
      # The layers themselves are changed, until {#disable}: so the given model computes the same as this one, which passes
      # calls on to it and has its parameters, names and state. Layers are checkpointed in training mode and with grad only,
      # and where the model runs them by `call`, as a module does its children; `forward` leaves them as they are.
      class SelectiveCheckpointing < Torch::NN::Module
        # A layer's `call`, once prepended to its singleton class. Modules can't be taken out again, so it asks whether it
        # is enabled.
        #
        # @api private
        module CheckpointedCall
          # How it is done, or nil. Belongs to the singleton class, so that a `dup` of the layer is an ordinary layer.
          Settings = Struct.new(:preserve_rng_state)

          def self.settings(layer)
            layer.singleton_class.instance_variable_get(:@torch_ddp_checkpointed)
          end

          def self.set(layer, settings)
            layer.singleton_class.instance_variable_set(:@torch_ddp_checkpointed, settings)
            layer.singleton_class.prepend(self) if settings
          end

          def call(*args, **kwargs)
            settings = CheckpointedCall.settings(self)
            return super unless settings && training && Torch.grad_enabled?

            run = ->(*inputs, **options) { super(*inputs, **options) }
            Checkpoint.checkpoint(run, *args, preserve_rng_state: settings.preserve_rng_state, **kwargs)
          end
        end
        private_constant :CheckpointedCall

        # The share of layers that is checkpointed unless something else is asked for.
        RATIO = 0.5

        # @return [Torch::NN::Module] the model that was given
        attr_reader :model

        # @return [Hash<String, Torch::NN::Module>] the chosen layers, by their names in the model
        attr_reader :checkpointed_layers

        # Without a policy `ratio` of the layers are chosen, spread evenly, the first one among them. Layers are the children
        # of the ModuleList or Sequential that has the most parameters; or of a longer one within it, if that has more than
        # half of these.
        #
        # @overload initialize(model, ratio: 0.5, layers: nil, preserve_rng_state: true)
        # @overload initialize(model, policy:, preserve_rng_state: true)
        # @overload initialize(model, preserve_rng_state: true, &policy)
        # @param model [Torch::NN::Module]
        # @param ratio [Numeric] the share of layers that is checkpointed, 0 to 1; their number is rounded
        # @param checkpoint_ratio [Numeric] the same
        # @param layers [Array<Torch::NN::Module>, nil] modules of the model that are its layers
        # @param policy [#call, nil] is called with the name of each module in the model and the module, and returns whether
        #   it is checkpointed; not asked about the model itself, about modules without a forward of their own, such as
        #   lists, or about what is within a module that is checkpointed
        # @param preserve_rng_state [Boolean] as for {Checkpoint.checkpoint}
        # @raise [ArgumentError] if arguments contradict each other, the ratio is out of range, there are no layers, the policy
        #   chooses none, or one of them is checkpointed already
        def initialize(model, ratio: nil, checkpoint_ratio: nil, layers: nil, policy: nil, preserve_rng_state: true, &block)
          super()
          raise ArgumentError, "model: expected a Torch::NN::Module, got #{model.inspect}" unless model.is_a?(Torch::NN::Module)

          given = {ratio: ratio, checkpoint_ratio: checkpoint_ratio, layers: layers, policy: policy, block: block}.compact.keys
          check_combination(given)
          @model = model
          @training = model.training
          @settings = CheckpointedCall::Settings.new(preserve_rng_state ? true : false)
          @checkpointed_layers = choose(policy || block, layers, ratio || checkpoint_ratio || RATIO).freeze
          enable
        end

        # Checkpoints the chosen layers (again, after {#disable}).
        #
        # @raise [ArgumentError] if another SelectiveCheckpointing does so already
        # @return [self]
        def enable
          taken = @checkpointed_layers.find { |_, layer| ![nil, @settings].any? { |own| own.equal?(CheckpointedCall.settings(layer)) } }
          if taken
            raise ArgumentError, "#{taken.first} is checkpointed by another SelectiveCheckpointing already: call its `disable` first"
          end

          @checkpointed_layers.each_value { |layer| CheckpointedCall.set(layer, @settings) }
          self
        end

        # Leaves the layers as they were: the next forward keeps all activations.
        #
        # @return [self]
        def disable
          @checkpointed_layers.each_value { |layer| CheckpointedCall.set(layer, nil) if enabled_for?(layer) }
          self
        end
        alias_method :remove, :disable

        # @return [Boolean] whether the chosen layers are checkpointed
        def enabled?
          @checkpointed_layers.each_value.all? { |layer| enabled_for?(layer) }
        end

        # Calls the model.
        def forward(*args, **kwargs)
          @model.call(*args, **kwargs)
        end

        # @!group The model's

        # @see Torch::NN::Module
        def named_children
          @model.named_children
        end

        # @see Torch::NN::Module
        def named_parameters(**options)
          @model.named_parameters(**options)
        end

        # @see Torch::NN::Module
        def named_buffers
          @model.named_buffers
        end

        # @see Torch::NN::Module
        def train(mode = true)
          @training = mode
          @model.train(mode)
          self
        end

        # @see Torch::NN::Module
        def apply(function)
          @model.apply(function)
          self
        end

        # @api private
        def _apply(function)
          @model._apply(function)
          self
        end

        # @!endgroup

        # Other methods are the model's.
        #
        # @api private
        def method_missing(name, ...)
          @model.respond_to?(name) ? @model.public_send(name, ...) : super
        end

        # @api private
        def respond_to_missing?(name, include_private = false)
          @model.respond_to?(name) || super
        end

        private

        def check_combination(given)
          [%i[ratio checkpoint_ratio], %i[policy block], *%i[policy block].product(%i[ratio checkpoint_ratio layers])].each do |one, other|
            raise ArgumentError, "expected #{one} or #{other}, got both" if given.include?(one) && given.include?(other)
          end
        end

        def enabled_for?(layer)
          @settings.equal?(CheckpointedCall.settings(layer))
        end

        def choose(policy, layers, ratio)
          return chosen_by(policy) if policy

          unless ratio.is_a?(Numeric) && ratio.real? && ratio >= 0 && ratio <= 1
            raise ArgumentError, "ratio: expected a number from 0 to 1, got #{ratio.inspect}"
          end
          found = layers ? named(layers) : layers_of_largest_list
          chosen = (ratio * found.size).round
          found.select.with_index { |_, i| (i * chosen) % found.size < chosen }.to_h
        end

        def named(layers)
          names = @model.named_modules.each_with_object({}.compare_by_identity) { |(name, layer), all| all[layer] = name }
          raise ArgumentError, "layers: expected modules of the model, got #{layers.inspect}" unless layers.is_a?(Array) && layers.any?

          layers.to_h do |layer|
            name = names[layer]
            raise ArgumentError, "layers: #{layer.inspect} is no module within the model" if name.nil? || name.empty?

            [name, layer]
          end
        end

        def layers_of_largest_list
          found = Layers.of(@model)
          return found unless found.empty?

          raise ArgumentError, "the model has no ModuleList and no Sequential with layers: pass its layers (layers:), or choose them by a block"
        end

        def chosen_by(policy)
          raise ArgumentError, "policy: expected an object with a method `call`, got #{policy.inspect}" unless policy.respond_to?(:call)

          found = {}
          @model.named_modules.each do |name, layer|
            next if name.empty? || abstract?(layer) || found.each_key.any? { |outer| Layers.within?(name, outer) }

            found[name] = layer if policy.call(name, layer)
          end
          raise ArgumentError, "the policy chose none of the model's modules: #{@model.named_modules.keys.drop(1).join(", ")}" if found.empty?

          found
        end

        # Has no forward, so nothing calls it.
        def abstract?(layer)
          layer.method(:forward).owner == Torch::NN::Module
        end
      end
    end
  end
end
