# frozen_string_literal: true

require_relative "../distributed"

module Torch
  module Distributed
    # Which parts of parameters processes hold, where a model is divided by tensor dimensions: {Parallel} divides it, and
    # checkpoints, the clipping of gradients and {FSDP} ask here.
    module Tensor
      autoload :Parallel, "torch/distributed/tensor/parallel"

      DROP_GRADIENTS = Optim::Fused.instance_method(:_zero_grad)
      LAYOUT = :@_layout
      private_constant :DROP_GRADIENTS, :LAYOUT

      class << self
        # @param parameter [Torch::NN::Parameter]
        # @return [Layout, nil] nil: nothing divides it but {FSDP}
        def layout(parameter)
          parameter.instance_variable_get(LAYOUT)
        end

        # Keeps of a parameter what this process holds by a layout. The parameter remains the object that it is, so optimizers
        # that have it and ties stay right. Its gradient is dropped.
        #
        # @param parameter [Torch::NN::Parameter] the whole one
        # @param layout [Layout] of its shape
        # @return [void]
        # @raise [ArgumentError] if the parameter is divided already, or of another shape
        def divide(parameter, layout)
          raise ArgumentError, "parameter: it is divided already, by #{layout(parameter).inspect}" if layout(parameter)
          unless parameter.shape == layout.shape
            raise ArgumentError, "parameter: expected the shape #{layout.shape} of its layout, got #{parameter.shape}"
          end

          DROP_GRADIENTS.bind_call(self, [{params: [parameter]}], true)
          resize(parameter, layout.take(parameter.detach)) if layout.divided?
          keep_layout(parameter, layout)
          nil
        end

        # @api private
        # @param parameter [Torch::NN::Parameter]
        # @return [Array<ProcessGroup>] whose ranks have different elements of it: that of a layout, and that of FSDP
        def dividing_groups(parameter)
          layout = layout(parameter)
          groups = layout&.divided? ? [layout.group] : []
          Distributed.autoload?(:FSDP) ? groups : groups.concat([*FSDP.group_of(parameter)])
        end

        # A parameter that takes the place of one, moved or converted.
        #
        # @api private
        # @param parameter [Torch::NN::Parameter] what this process holds by the layout
        def keep_layout(parameter, layout)
          parameter.instance_variable_set(LAYOUT, layout)
          LocalPiece.mark(parameter, layout.shape) if layout.divided?
        end

        private

        # As long as there is a graph of an earlier forward, autograd expects gradients of the shape that the parameter had then,
        # unless it has had another dtype in between.
        def resize(parameter, part)
          parameter.set_data(Torch.empty(0, dtype: (part.dtype == :float32) ? :float64 : :float32, device: part.device))
          parameter.set_data(part)
        end
      end
    end
  end
end

require_relative "tensor/layout"
require_relative "tensor/placement"
