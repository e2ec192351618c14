# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # Reads from a checkpoint what objects need: of what ranks divide only this rank's ranges.
      #
      # @api private
      module Reading
        module_function

        # @param objects [Hash] by name
        # @param saved [Hash{String => Object}] their states, with {Stored} tensors
        # @param parts [Parts]
        # @return [Hash{String => Object}] the states with tensors, {Slice}s of a sharded model's, and {OptimizerParts::Fetched} of optimizers
        #   that are divided or were saved by names. What does not fit is left for {States.check_fit} to say.
        def objects(objects, saved, parts)
          pairs = saved.map { |name, state| [name, objects[name] || objects[name.to_sym], state] }
          # Models say what the parameters of optimizers may be called.
          models, others = pairs.partition { |_, object, _| object.is_a?(Torch::NN::Module) }
          read = (models + others).to_h { |name, object, state| [name, fetch(object, state, parts)] }
          read.slice(*saved.keys)
        end

        def fetch(object, saved, parts)
          case object
          when Torch::NN::Module then model(States.unwrapped(object), saved, parts)
          when Hash, Array
            inside(object, saved, parts)
          else
            named = OptimizerParts.by_names?(saved) && object.respond_to?(:load_state_dict)
            (named || parts.divides?(object)) ? optimizer(object, saved, parts) : whole(saved)
          end
        end

        def inside(object, saved, parts)
          case saved
          when Hash then saved.to_h { |key, state| [key, fetch(inner(object, key), state, parts)] }
          when Array then saved.each_with_index.map { |state, i| fetch(inner(object, i), state, parts) }
          else saved
          end
        end

        # The object within an Array or a Hash that a key of the saved state stands for.
        def inner(object, key)
          return key.is_a?(Integer) ? object[key] : nil if object.is_a?(Array)

          object.key?(key) ? object[key] : (object[key.to_sym] if key.is_a?(String))
        end

        # @return [Object] with tensors in the place of {Stored} ones
        def whole(value)
          case value
          when Stored then value.whole
          when Hash then without_names(value).transform_values { |each| whole(each) }
          when Array then value.map { |each| whole(each) }
          else value
          end
        end

        # The names beside an optimizer's numbers are no option of its groups.
        def without_names(state)
          groups = state["param_groups"]
          return state unless groups.is_a?(Array) && groups.all?(Hash) && groups.any? { |group| group.key?("param_names") }

          state.merge("param_groups" => groups.map { |group| group.except("param_names") })
        end

        def model(model, saved, parts)
          return whole(saved) unless saved.is_a?(Hash)

          own = parts.layout(model)
          saved = States.named_as(own, saved)
          parts.learn_names(model, saved)
          saved.to_h do |name, source|
            piece = own[name]
            sliced = (piece.nil? || parts.piece?(piece.tensor)) && [Stored, Torch::Tensor].any? { |kind| source.is_a?(kind) }
            [name, sliced ? Stored.slice(source, piece&.regions) : whole(source)]
          end
        end

        def optimizer(object, saved, parts)
          by_names = OptimizerParts.by_names?(saved)
          # A ZeroRedundancyOptimizer divides what is numbered itself.
          return whole(saved) unless by_names || parts.named?(object)

          found = parts.optimizer(object)
          return found.fetch(saved) if found

          raise CheckpointError, "the state of this #{object.class.name} was saved by the names of parameters: load the models whose parameters it " \
            "has along with it, under the names that they were saved by"
        end
      end
    end
  end
end
