# frozen_string_literal: true

require_relative "test_helper"
require "torch/distributed/fsdp"

# Models that are trained sharded, beside one that is trained by one process with the data of all.
module ShardedTraining
  FSDP = Torch::Distributed::FSDP

  # Layers with a skip, of odd sizes.
  class Tower < Torch::NN::Module
    attr_reader :layers, :head

    def initialize(width: 7, hidden: 11, depth: 3)
      super()
      @input = Torch::NN::Linear.new(5, width)
      @layers = Torch::NN::ModuleList.new(
        Array.new(depth) { Torch::NN::Sequential.new(Torch::NN::Linear.new(width, hidden), Torch::NN::Tanh.new, Torch::NN::Linear.new(hidden, width)) }
      )
      @head = Torch::NN::Linear.new(width, 3)
    end

    def forward(x)
      x = @input.call(x)
      @layers.each { |layer| x += layer.call(x) }
      @head.call(x)
    end
  end

  # The same values on all ranks.
  def make(seed: 1, dtype: :float64)
    Torch.manual_seed(seed)
    model = yield
    model.double if dtype == :float64
    # A conversion makes other parameters, and so would untie them.
    model.tie if model.respond_to?(:tie)
    model
  end

  def tower(dtype: :float64, **options)
    make(dtype: dtype) { Tower.new(**options) }
  end

  # Layers as units, and the rest.
  def shard(model, **options)
    model.layers.each { |layer| FSDP.fully_shard(layer, **options) }
    FSDP.fully_shard(model, **options)
  end

  # Rows of all ranks; odd, and the same everywhere.
  def batch(step, size, width: 5, targets: 3, rows: 2, dtype: :float64)
    values = ->(count, shift) { (Torch.arange(0, count, dtype: :float64) * 0.37 + step * 0.91 + shift).sin.to(dtype: dtype) }
    [values.call(size * rows * width, 0).view(size * rows, width), values.call(size * rows * targets, 0.5).view(size * rows, targets)]
  end

  def mine(tensor, rank, size)
    rows = tensor.size(0) / size
    tensor.narrow(0, rank * rows, rows)
  end

  def loss(output, target)
    (output - target).pow(2).mean
  end

  # Each parameter's largest difference from the plain model's, relative to the latter's largest value.
  #
  # @return [Float] the largest
  def difference(plain, full)
    plain.state_dict.map do |name, tensor|
      (tensor.detach - full.fetch(name)).abs.max.item / [tensor.detach.abs.max.item, 1e-30].max
    end.max
  end

  # Trains both for some steps.
  #
  # @param model [Object] that is called with this rank's part of the input
  # @return [Float] how much they differ, losses included
  def follow(plain, model, rank, size, steps: 20, dtype: :float64, optimizer: ->(parameters) { Torch::Optim::Adam.new(parameters, lr: 0.01) }, clip: nil)
    optimizers = [optimizer.call(plain.parameters.uniq(&:object_id)), optimizer.call(model.parameters.uniq(&:object_id))]
    worst = 0
    steps.times do |step|
      x, y = batch(step, size, dtype: dtype)
      optimizers.each(&:zero_grad)
      expected = loss(plain.call(x), y)
      expected.backward
      actual = loss(model.call(mine(x, rank, size)), mine(y, rank, size))
      actual.backward
      if clip
        Torch::NN::Utils.clip_grad_norm_(plain.parameters, clip)
        model.clip_grad_norm_(clip)
      end
      optimizers.each(&:step)
      mean = Torch::Distributed.all_reduce(actual.detach.clone, op: :avg).item
      worst = [worst, (mean - expected.item).abs / expected.item].max
    end
    [worst, difference(plain, FSDP.full_state_dict(model.is_a?(FSDP::FullyShardedDataParallel) ? model.module : model))].max
  end

  # The gradients of the rank's pieces, and what they should be by those of a model that one process has.
  #
  # @param units [Array] none: the parameters are whole
  # @return [Hash{String => Array}] pairs; nil: there is none
  def gradients(net, plain, units = FSDP.units_of(net))
    whole = plain.named_parameters
    found = {}.compare_by_identity
    units.each do |unit|
      unit.each_piece { |_, piece, _, start, _, count| found[piece] = [start, count] }
    end
    net.named_parameters.to_h do |name, piece|
      start, count = found.fetch(piece) { [0, piece.numel] }
      expected = whole[name].grad&.flatten&.narrow(0, start, count)&.to_a
      [name, [expected, piece.grad&.flatten&.to_a]]
    end
  end

  def assert_gradients(found, message = nil)
    found.each do |name, (expected, actual)|
      assert_equal expected.nil?, actual.nil?, "#{name} #{message}: expected #{expected.inspect}, got #{actual.inspect}"
      expected&.zip(actual) { |one, other| assert_in_delta one, other, 1e-12, "#{name} #{message}" }
    end
  end
end
