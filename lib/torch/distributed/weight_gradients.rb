# frozen_string_literal: true

module Torch
  module Distributed
    # Gradients of weights and biases that are computed later than those of the layers' inputs, as schedules of pipelines
    # without a bubble want it: the rank before waits for the latter alone.
    #
    #   weights = Torch::Distributed::WeightGradients.defer { loss.backward }
    #   send(input.grad)
    #   weights.run
    #
    # It concerns {NN.linear}, {NN.column_linear} and {NN.row_linear}: their part of backward leaves the gradients of their
    # weights and biases, and keeps the layer's input and the result's gradient for them. All others are computed at once, as
    # always: those of other operations; of weights that are computed from others (no leaves); with `create_graph`; and by a
    # backward for selected tensors.
    #
    # @!method self.defer
    #   Defers for each backward that this thread calls within the block. Within the block of another one the inner one counts;
    #   other threads defer nothing. What was deferred before an exception leaves the block is dropped.
    #   @yield calls `backward`
    #   @return [WeightGradients]
    # @!method run
    #   Computes the gradients, in the order in which backward came to them, and accumulates them in `grad`. Hooks on gradients run
    #   as in `backward`, DistributedDataParallel's and FSDP's among them, which see a gradient only now. A part that is
    #   done is freed; the second time there is nothing to do. Without it gradients are dropped with this object. Any thread
    #   may call it, one at a time, outside of the block.
    #   @return [nil]
    #   @raise [Error] what libtorch or a hook raised; what was left is dropped
    class WeightGradients
    end
  end
end
