# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # Puts together the parameters of a model that ranks divide: by {FSDP}, by layouts, or by both.
      #
      # @api private
      module Gathering
        module_function

        # A collective call, of all ranks that have a part; one unit after the other. What was gathered is collected as it comes to the
        # budget of {StepMemory}, so that no process ever holds the whole model that does not keep it.
        #
        # @param model [Torch::NN::Module]
        # @yieldparam gathered [Array] of parameters and whole tensors
        def each(model)
          taken = {}.compare_by_identity
          FSDP.units_in(model).each do |unit|
            yield whole(unit, taken)
            StepMemory.instance.left(unit.parameters.sum { |each| each.numel * each.element_size })
          end
          model.parameters.uniq(&:object_id).each do |parameter|
            yield [[parameter, gathered(parameter, parameter.detach)]] if Tensor.layout(parameter)&.divided? && !taken[parameter]
          end
        end

        # @param taken [Hash{Torch::NN::Parameter => Boolean}] gets the unit's parameters
        # @return [Array] of the unit's parameters and whole tensors
        def whole(unit, taken)
          flat = unit.gather
          pairs = []
          unit.each_piece do |_, parameter, offset, _, shape|
            taken[parameter] = true
            pairs << [parameter, gathered(parameter, flat.narrow(0, offset, shape.inject(1, :*)).view(*shape))]
          end
          pairs
        end

        # @param tensor [Torch::Tensor] what the ranks of a parameter's layout divide
        # @return [Torch::Tensor]
        def gathered(parameter, tensor)
          layout = Tensor.layout(parameter)
          layout&.divided? ? layout.gather(tensor) : tensor
        end
      end
    end
  end
end
