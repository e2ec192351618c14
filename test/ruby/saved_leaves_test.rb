# frozen_string_literal: true

require "torch/utils/checkpoint"
require_relative "sharded_training"

# Leaves that need a gradient, saved for backward through hooks: by sharded units, and where saved tensors are moved. Nothing but the
# graphs of several micro-batches keeps them, as a pipeline's stages leave it, and some are saved by nodes of which no edge leads to them.
class SavedLeavesTest < Minitest::Test
  include ShardedTraining

  Checkpoint = Torch::Utils::Checkpoint
  NN = Torch::Distributed::NN

  # Saves a leaf beside its argument.
  class ScaledBy < Torch::Distributed::Function
    def self.forward(ctx, x, by)
      ctx.save_for_backward(by.first, x)
      x * by.first
    end

    def self.backward(ctx, grad)
      by, x = ctx.saved_tensors
      raise "expected the leaves" unless by.requires_grad && x.shape == grad.shape

      [grad * by, nil]
    end
  end

  # What a layer does with its input, and with a leaf that nobody has afterwards.
  WAYS = {
    operations: ->(layer, x, leaf) { layer.call(x * leaf) },
    checkpoint: ->(layer, x, _) { Checkpoint.checkpoint(layer, x) },
    both: ->(layer, x, leaf) { Checkpoint.checkpoint(->(a, b) { layer.call(a * b) }, x, leaf) },
    function: ->(layer, x, leaf) { layer.call(ScaledBy.apply(x, [leaf])) },
    linear: ->(layer, x, _) { NN.linear(x, layer.weight, layer.bias) }
  }.freeze

  class Layer < Torch::NN::Module
    def initialize(way)
      super()
      @linear = Torch::NN::Linear.new(3, 3)
      @way = WAYS.fetch(way)
    end

    def forward(x, leaf)
      @way.call(@linear, x, leaf).tanh
    end
  end

  class Layers < Torch::NN::Module
    attr_reader :layers

    def initialize(way)
      super()
      @layers = Torch::NN::ModuleList.new(Array.new(2) { Layer.new(way) })
    end

    def forward(x, leaf)
      @layers.reduce(x) { |hidden, layer| layer.call(hidden, leaf) }
    end
  end

  KEEPERS = {
    full_shard: ->(net) { FSDP.fully_shard(net.layers[0]) && FSDP.fully_shard(net) },
    shard_grad_op: ->(net) { net.layers.each { |layer| FSDP.fully_shard(layer, reshard_after_forward: false) } && FSDP.fully_shard(net) },
    one_unit: ->(net) { FSDP.fully_shard(net) },
    moved: ->(net) { Checkpoint.offload_wrapper(net) }
  }.freeze

  def leaf(number, *shape)
    values = (Torch.arange(0, shape.inject(:*), dtype: :float64) * 0.7 + number).sin
    values.view(*shape).detach.requires_grad!
  end

  # @return [Array<Torch::Tensor>] losses, which keep all that is left of the micro-batches
  def losses(net)
    graphs = Thread.new { Array.new(3) { |part| net.call(leaf(part, 2, 3), leaf(part + 7, 3)).sum } }.value
    3.times { net.call(leaf(9, 2, 3), leaf(9, 3)) } # what Ruby's call caches and stack keep
    GC.start
    graphs
  end

  def test_leaves_that_graphs_alone_keep
    found = world(2) do
      WAYS.keys.product(KEEPERS.keys).map do |way, keeper|
        plain, net = make { Layers.new(way) }, make { Layers.new(way) }
        losses(plain).each(&:backward)
        KEEPERS.fetch(keeper).call(net)
        losses(net).each(&:backward)
        ["#{way} #{keeper}", (keeper == :moved) ? gradients(net, plain, []) : gradients(net, plain)]
      end
    end
    found.flatten(1).each { |message, grads| assert_gradients grads, message }
  end

  # The gradients of weights are computed when the graph is gone already.
  def test_weight_gradients_that_are_computed_later
    found = world(1) do
      plain, net = make { Layers.new(:linear) }, make { Layers.new(:linear) }
      losses(plain).each(&:backward)
      later = losses(net).map { |loss| Checkpoint.save_on_cpu { Torch::Distributed::WeightGradients.defer { loss.backward } } }
      GC.start
      later.each(&:run)
      gradients(net, plain, [])
    end
    found.each { |grads| assert_gradients grads }
  end
end
