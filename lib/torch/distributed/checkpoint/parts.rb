# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # Which tensors of models and optimizers ranks divide, and what the parameters are called: by the path of their model
      # among the objects and their name in it, "model.layers.0.weight".
      #
      # A model whose names are a part of those of a larger one, of which other ranks have the rest, says so by a method
      # `distributed_state_dict_partial?`: a stage of a pipeline, for instance.
      #
      # @api private
      class Parts
        # @param model [Torch::NN::Module]
        # @return [Boolean] whether processes hold different parts of it
        def self.divides?(model)
          inner = States.unwrapped(model)
          return true if (FSDP.respond_to?(:units_in) && !FSDP.units_in(inner).empty?) || partial?(model) || partial?(inner)

          inner.parameters.any? { |parameter| Tensor.layout(parameter)&.divided? }
        end

        # @return [Boolean] whether a model says that other ranks have other names of it
        def self.partial?(model)
          model.respond_to?(:distributed_state_dict_partial?) && model.distributed_state_dict_partial?
        end

        # @param objects [Hash] by name: models and optimizers, in hashes and arrays of them too
        # @raise [ArgumentError] if parameters of a sharded model are whole now
        def initialize(objects)
          @names = {}.compare_by_identity
          @places = {}.compare_by_identity
          @partial = {}.compare_by_identity
          @optimizers = []
          visit(nil, objects)
        end

        # @return [Boolean] whether ranks have different parts of a model
        def sharded?
          !@places.empty? || !@partial.empty?
        end

        # @param consolidated [Boolean] whether an optimizer counts whose state was gathered on this rank
        # @return [Boolean] whether anything is divided
        def divided?(consolidated: true)
          sharded? || @optimizers.any? { |each| zero?(each) && (consolidated || !each.consolidated?) }
        end

        # @param model [Torch::NN::Module]
        # @return [Hash{String => Piece}] what a model's state consists of
        def layout(model)
          named = model.named_parameters
          model.state_dict.compact.to_h do |name, tensor|
            parameter = named[name]
            place = @places[parameter]
            [name, place ? Piece.new(parameter, place.shape, place.regions(0, LocalPiece.numel(parameter))) : Piece.whole(tensor)]
          end
        end

        # @return [PartialState, Hash{String => Torch::Tensor, Piece}] a model's state, in which what all ranks have alike is whole
        def state_of_model(model)
          return PartialState.new(layout(model)) if partial?(model)

          layout(model).transform_values { |piece| piece?(piece.tensor) ? piece : piece.tensor }
        end

        # @return [Boolean] whether ranks divide the parameter
        def piece?(parameter)
          @places.key?(parameter)
        end

        # @return [Boolean] whether other ranks have other names of the model
        def partial?(model)
          @partial.key?(model)
        end

        # What was saved under a name of a model's may have another one there, since it has several.
        #
        # @param model [Torch::NN::Module]
        # @param saved [Hash{String => Stored}] by name
        def learn_names(model, saved)
          named = model.named_parameters
          saved.each { |name, source| @names[named[name]] |= [source.name] if named[name] && source.is_a?(Stored) }
        end

        # @return [OptimizerParts, nil] nil: the object is no optimizer, or its state is not known by names
        def optimizer(object)
          return unless optimizer?(object)

          parameters = object.param_groups.flat_map { |group| group[:params] }
          unknown = parameters.find { |each| !@names.key?(each) }
          return OptimizerParts.new(object, @names, @places, parameters.any? { |each| of_partial?(each) }) unless unknown
          return unless zero?(object) || parameters.any? { |each| piece?(each) || of_partial?(each) }

          raise ArgumentError, "the optimizer: a parameter of shape #{unknown.shape} is in none of the models given: expected the " \
            "optimizer along with the models whose parameters it has"
        end

        # @return [Object] an optimizer's state by numbers, with the names beside them where they are known
        def numbered_state(object)
          state = object.state_dict
          return state unless optimizer?(object) && named?(object)

          groups = state["param_groups"].zip(object.param_groups).map do |saved, group|
            saved.merge("param_names" => group[:params].map { |each| @names[each].first })
          end
          state.merge("param_groups" => groups)
        end

        # @return [Boolean] whether an optimizer's parameters are those of the models
        def named?(optimizer)
          optimizer.param_groups.all? { |group| group[:params].all? { |each| @names.key?(each) } }
        end

        # @return [Boolean] whether an optimizer's state is in pieces
        def divides?(object)
          optimizer?(object) &&
            (zero?(object) || object.param_groups.any? { |group| group[:params].any? { |each| piece?(each) || of_partial?(each) } })
        end

        # @return [Place, nil] which part this rank has of a parameter; nil: all ranks have it
        def place(parameter)
          @places[parameter]
        end

        private

        def of_partial?(parameter)
          @partial.key?(parameter)
        end

        def visit(path, object)
          case object
          when Hash then object.each { |key, each| visit([path, key].compact.join("."), each) }
          when Array then object.each_with_index { |each, i| visit("#{path}.#{i}", each) }
          when Torch::NN::Module then add_model(path, object)
          else @optimizers << object if optimizer?(object)
          end
        end

        def add_model(path, wrapped)
          model = States.unwrapped(wrapped)
          partial = [wrapped, model].any? { |each| Parts.partial?(each) }
          @partial[model] = true if partial
          model.named_parameters.each do |name, parameter|
            (@names[parameter] ||= []) << "#{path}.#{name}"
            @partial[parameter] = true if partial
            layout = Tensor.layout(parameter)
            @places[parameter] = Place.new(layout.shape, layout, 0) if layout&.divided?
          end
          add_units(model) if FSDP.respond_to?(:units_in)
        end

        def add_units(model)
          FSDP.units_in(model).each do |unit|
            unit.each_piece do |_, parameter, _, start, shape, count|
              layout = Tensor.layout(parameter)
              @places[parameter] = Place.new(layout ? layout.shape : shape, layout, start, unit.group)
              next if LocalPiece.shape(parameter) == [count]

              raise ArgumentError, "#{@names[parameter]&.first} is gathered now: expected a call after reshard, or outside of " \
                "summon_full_params"
            end
          end
        end

        def optimizer?(object)
          object.is_a?(Torch::Optim::Optimizer) && !object.is_a?(Optim::PostLocalSGDOptimizer)
        end

        def zero?(object)
          object.is_a?(Optim::ZeroRedundancyOptimizer)
        end
      end
    end
  end
end
