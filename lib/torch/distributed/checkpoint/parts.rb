# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # Which tensors of models and optimizers ranks divide, and what the parameters are called: by the path of their model
      # among the objects and their name in it, "model.layers.0.weight".
      #
      # @api private
      class Parts
        # @param objects [Hash] by name: models and optimizers, in hashes and arrays of them too
        # @raise [ArgumentError] if parameters of a sharded model are whole now
        def initialize(objects)
          @names = {}.compare_by_identity
          @pieces = {}.compare_by_identity
          @sharded = false
          @optimizers = []
          visit(nil, objects)
        end

        # @return [Boolean] whether a model's parameters are divided
        def sharded?
          @sharded
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
            start, shape = @pieces[named[name]]
            [name, start ? Piece.new(named[name], shape, start) : Piece.new(tensor, tensor.shape, 0)]
          end
        end

        # @return [Hash{String => Torch::Tensor, Piece}] a model's state, in which what all ranks have alike is whole
        def state_of_model(model)
          layout(model).transform_values { |piece| piece?(piece.tensor) ? piece : piece.tensor }
        end

        # @return [Boolean] whether the parameter is one of a sharded model
        def piece?(parameter)
          @pieces.key?(parameter)
        end

        # @return [OptimizerParts, nil] nil: the object is no optimizer, or its state is not known by names
        def optimizer(object)
          return unless optimizer?(object)

          parameters = object.param_groups.flat_map { |group| group[:params] }
          unknown = parameters.find { |each| !@names.key?(each) }
          return OptimizerParts.new(object, @names, @pieces) unless unknown
          return unless zero?(object) || parameters.any? { |each| piece?(each) }

          raise ArgumentError, "the optimizer: a parameter of shape #{unknown.shape} is in none of the models given: expected the " \
            "optimizer along with the models whose parameters it has"
        end

        # @return [Boolean] whether an optimizer's parameters are those of the models
        def named?(optimizer)
          optimizer.param_groups.all? { |group| group[:params].all? { |each| @names.key?(each) } }
        end

        # @return [Boolean] whether an optimizer's state is in pieces
        def divides?(object)
          optimizer?(object) && (zero?(object) || object.param_groups.any? { |group| group[:params].any? { |each| piece?(each) } })
        end

        private

        def visit(path, object)
          case object
          when Hash then object.each { |key, each| visit([path, key].compact.join("."), each) }
          when Array then object.each_with_index { |each, i| visit("#{path}.#{i}", each) }
          when Torch::NN::Module then add_model(path, States.unwrapped(object))
          else @optimizers << object if optimizer?(object)
          end
        end

        def add_model(path, model)
          model.named_parameters.each { |name, parameter| @names[parameter] ||= "#{path}.#{name}" }
          return unless FSDP.respond_to?(:units_in)

          FSDP.units_in(model).each do |unit|
            @sharded = true
            unit.each_piece do |_, parameter, _, start, shape, count|
              @pieces[parameter] = [start, shape]
              next if parameter.shape == [count]

              raise ArgumentError, "#{@names[parameter]} is gathered now: expected a call after reshard, or outside of summon_full_params"
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
