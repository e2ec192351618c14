# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # Puts together the parameters of a model that ranks divide: by {FSDP}, by layouts, or by both.
      #
      # @api private
      module Gathering
        module_function

        # A collective call, of all ranks that have a part; one unit after the other, so that no more than one is gathered at a time.
        #
        # @param model [Torch::NN::Module]
        # @yieldparam gathered [Enumerator] of parameters and whole tensors; a collective call each
        def each(model)
          taken = {}.compare_by_identity
          FSDP.units_in(model).each do |unit|
            flat = unit.gather
            whole = []
            unit.each_piece do |_, parameter, offset, _, shape|
              taken[parameter] = true
              whole << [parameter, gathered(parameter, flat.narrow(0, offset, shape.inject(1, :*)).view(*shape))]
            end
            yield whole
          end
          model.parameters.uniq(&:object_id).each do |parameter|
            yield [[parameter, gathered(parameter, parameter.detach)]] if Tensor.layout(parameter)&.divided? && !taken[parameter]
          end
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
