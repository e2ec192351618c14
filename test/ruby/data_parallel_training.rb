# frozen_string_literal: true

require_relative "test_helper"

# What tests of DistributedDataParallel share: small models of odd sizes, and training that is compared with that of one
# process.
module DataParallelTraining
  DDP = Torch::NN::Parallel::DistributedDataParallel
  F = Torch::NN::F
  TOLERANCE = {float64: 1e-10, float32: 1e-5}.freeze

  # Divides by 1 to 4 ranks.
  BATCH = 12

  # Sizes that fill no vector register, chunk or page.
  class Odd < Torch::NN::Module
    def initialize
      super
      @first = Torch::NN::Linear.new(7, 13)
      @second = Torch::NN::Linear.new(13, 5)
      @third = Torch::NN::Linear.new(5, 3)
      @scale = Torch::NN::Parameter.new(Torch.ones(3))
    end

    def forward(x)
      @third.call(Torch.tanh(@second.call(Torch.tanh(@first.call(x))))) * @scale
    end
  end

  # Has a parameter that nothing uses, and one that every other call uses.
  class Branching < Odd
    def initialize
      super
      @unused = Torch::NN::Linear.new(3, 5)
      @extra = Torch::NN::Linear.new(7, 3)
    end

    def forward(x, branch = true)
      branch ? super(x) + @extra.call(x) : super(x)
    end
  end

  class Normed < Torch::NN::Module
    def initialize
      super
      @linear = Torch::NN::Linear.new(3, 4)
      @norm = Torch::NN::BatchNorm1d.new(4)
    end

    def forward(x)
      @norm.call(@linear.call(x))
    end
  end

  def numbers(model)
    model.named_parameters.to_h { |name, parameter| [name.delete_prefix("module."), parameter.detach.to_a.flatten] }
  end

  def gradients(model)
    model.named_parameters.to_h { |name, parameter| [name.delete_prefix("module."), parameter.grad && dense(parameter.grad).to_a.flatten] }
  end

  def dense(tensor)
    (tensor.layout == :strided) ? tensor : tensor.to_dense
  end

  def norm(values)
    Math.sqrt(values.sum { |value| value * value })
  end

  def assert_close(expected, actual, tolerance, message = nil)
    difference = norm(expected.zip(actual).map { |a, b| a - b })
    assert_operator difference, :<=, tolerance * norm(expected), message
  end

  # Every name's values are those of one process.
  def assert_follows(expected, actual, tolerance, message = nil)
    assert_equal expected.keys, actual.keys
    expected.each do |name, values|
      next assert_nil(actual[name], "#{name} #{message}") if values.nil?

      assert_close values, actual[name], tolerance, "#{name} #{message}"
    end
  end

  # Steps of SGD; each process takes its share of every batch. The last step's gradients come with the parameters.
  #
  # @param kind [Class] of the model
  # @param prepare [Proc, nil] called with the wrapped model
  # @yieldparam model [Torch::NN::Module]
  # @yieldparam input [Torch::Tensor] this rank's share
  # @yieldparam step [Integer]
  # @yieldreturn [Torch::Tensor] the output
  def train(rank, size, kind: Odd, dtype: :float64, steps: 5, wrap: true, prepare: nil, lr: 0.1, **options)
    Torch.manual_seed(7)
    net = kind.new
    net.double if dtype == :float64
    inputs = Torch.randn(steps, BATCH, 7, dtype: dtype)
    targets = Torch.randn(steps, BATCH, 3, dtype: dtype)
    options = options.transform_values { |value| value.is_a?(Proc) ? value.call(net) : value }
    model = wrap ? DDP.new(net, **options) : net
    prepare&.call(model) if wrap
    optimizer = Torch::Optim::SGD.new(net.parameters, lr: lr, momentum: 0.5)
    share = BATCH / size
    steps.times do |step|
      optimizer.zero_grad
      input = inputs[step].narrow(0, rank * share, share)
      output = block_given? ? yield(model, input, step) : model.call(input)
      F.mse_loss(output, targets[step].narrow(0, rank * share, share)).backward
      optimizer.step
    end
    [numbers(model), gradients(model)]
  end

  # The same on one process of its own.
  def alone_trained(**options, &block)
    Torch::Distributed.fork_world(1) { train(0, 1, wrap: false, **options, &block) }.first
  end

  # Trains on `size` ranks and compares parameters and gradients of all with those of one process.
  def assert_trains(expected, size, dtype: :float64, message: nil, **options, &block)
    results = world(size) { |rank| train(rank, size, dtype: dtype, **options, &block) }
    message = "on #{size} ranks #{message || options.keys}"
    assert_equal 1, results.uniq.size, "ranks differ #{message}"
    expected.zip(results.first).each { |one, other| assert_follows(one, other, TOLERANCE.fetch(dtype), message) }
  end
end
