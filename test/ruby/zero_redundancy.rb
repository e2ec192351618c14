# frozen_string_literal: true

require_relative "test_helper"

# What tests of ZeroRedundancyOptimizer share.
module ZeroRedundancy
  ZeRO = Torch::Distributed::Optim::ZeroRedundancyOptimizer

  # No number of ranks divides them all; one has no dimension, one no elements.
  SHAPES = [[17, 5], [1], [], [3, 7, 2], [13], [0]].freeze

  OPTIMIZERS = {
    sgd: [Torch::Optim::SGD, {lr: 0.05, momentum: 0.9, nesterov: true, weight_decay: 0.01}],
    adam: [Torch::Optim::Adam, {lr: 0.01, amsgrad: true}],
    adamw: [Torch::Optim::AdamW, {lr: 0.01, weight_decay: 0.1}],
    rmsprop: [Torch::Optim::RMSprop, {lr: 0.01, momentum: 0.9, centered: true}],
    adagrad: [Torch::Optim::Adagrad, {lr: 0.05, lr_decay: 0.01, initial_accumulator_value: 0.1}],
    adadelta: [Torch::Optim::Adadelta, {lr: 0.5}],
    adamax: [Torch::Optim::Adamax, {lr: 0.02}],
    asgd: [Torch::Optim::ASGD, {lr: 0.05, t0: 2.0}],
    rprop: [Torch::Optim::Rprop, {lr: 0.01}],
    fused_sgd: [Torch::Distributed::Optim::FusedSGD, {lr: 0.05, momentum: 0.9}],
    fused_adamw: [Torch::Distributed::Optim::FusedAdamW, {lr: 0.01, weight_decay: 0.1}]
  }.freeze

  def parameters(dtype = :float32)
    SHAPES.each_with_index.map do |shape, index|
      values = (Torch.arange(0, shape.inject(1, :*), dtype: :float64) * 0.7391 + index).sin.reshape(shape)
      Torch::NN::Parameter.new(values.to(dtype: dtype))
    end
  end

  def write_gradients(params, step)
    params.each_with_index do |param, index|
      values = Torch.arange(0, param.numel, dtype: :float64)
      param.grad = ((values * 0.317 + 13 * step + index).cos * 0.1).reshape(param.shape).to(dtype: param.dtype)
    end
  end

  # torch-rb 0.12 cannot set a gradient to nil.
  def drop_gradients(params)
    Torch::Distributed::Optim::FusedSGD.new(params, lr: 1).zero_grad
  end

  def values(params)
    params.map { |param| [param.detach.to_a].flatten }
  end

  def state(optimizer)
    optimizer.instance_variable_get(:@state)
  end

  # Each parameter's values, by the norm of what they should be.
  def assert_near(expected, got, tolerance, message = nil)
    assert_equal expected.map(&:size), got.map(&:size), message
    expected.zip(got) do |one, other|
      size = Math.sqrt(one.sum { |value| value * value })
      apart = Math.sqrt(one.zip(other).sum { |value, mine| (value - mine)**2 })
      assert_operator apart, :<=, tolerance * size, message
    end
  end
end
