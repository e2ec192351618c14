# frozen_string_literal: true

require_relative "../distributed"

module Torch
  module Distributed
    # Which parts of parameters processes hold, where a model is divided by tensor dimensions: {Parallel} divides it, and
    # checkpoints, the clipping of gradients and {FSDP} ask here.
    module Tensor
      class << self
        # @param parameter [Torch::NN::Parameter]
        # @return [Layout, nil] nil: nothing divides it but {FSDP}
        def layout(parameter)
          @layouts[parameter]
        end

        # Keeps of a parameter what this process holds by a layout. The parameter remains the object that it is, so optimizers
        # that have it and ties stay right. Its gradient is dropped.
        #
        # @param parameter [Torch::NN::Parameter] the whole one
        # @param layout [Layout] of its shape
        # @return [void]
        # @raise [ArgumentError] if the parameter is divided already, or of another shape
        def divide(parameter, layout)
          raise ArgumentError, "parameter: it is divided already, by #{@layouts[parameter].inspect}" if @layouts[parameter]
          unless parameter.shape == layout.shape
            raise ArgumentError, "parameter: expected the shape #{layout.shape} of its layout, got #{parameter.shape}"
          end

          parameter.grad = nil
          parameter.set_data(layout.take(parameter.detach)) if layout.divided?
          @layouts[parameter] = layout
          nil
        end
      end
      @layouts = ObjectSpace::WeakMap.new
    end
  end
end

require_relative "tensor/layout"
