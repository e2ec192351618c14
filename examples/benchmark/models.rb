# frozen_string_literal: true

require "torch/distributed"

# The models of the benchmarks. The same stand in ddp_step.py for PyTorch.
module BenchmarkModels
  # Applies layers one after the other, with ReLU between them.
  class Chain < Torch::NN::Module
    def initialize(sizes)
      super()
      @last = sizes.size - 2
      sizes.each_cons(2).with_index do |(from, to), i|
        instance_variable_set("@fc#{i}", Torch::NN::Linear.new(from, to))
      end
    end

    def forward(x)
      x = Torch.flatten(x, start_dim: 1)
      (0..@last).each do |i|
        x = instance_variable_get("@fc#{i}").call(x)
        x = Torch::NN::F.relu(x) if i < @last
      end
      Torch::NN::F.log_softmax(x, 1)
    end
  end

  # The network of PyTorch's MNIST example: about 1.2 million parameters.
  class MNISTNet < Torch::NN::Module
    def initialize
      super
      @conv1 = Torch::NN::Conv2d.new(1, 32, 3, stride: 1)
      @conv2 = Torch::NN::Conv2d.new(32, 64, 3, stride: 1)
      @dropout1 = Torch::NN::Dropout.new(p: 0.25)
      @dropout2 = Torch::NN::Dropout.new(p: 0.5)
      @fc1 = Torch::NN::Linear.new(9216, 128)
      @fc2 = Torch::NN::Linear.new(128, 10)
    end

    def forward(x)
      x = Torch::NN::F.relu(@conv1.call(x))
      x = Torch::NN::F.relu(@conv2.call(x))
      x = @dropout1.call(Torch::NN::F.max_pool2d(x, 2))
      x = Torch::NN::F.relu(@fc1.call(Torch.flatten(x, start_dim: 1)))
      Torch::NN::F.log_softmax(@fc2.call(@dropout2.call(x)), 1)
    end
  end

  # Its names here.
  CNN = %w[cnn mnist_cnn].freeze

  SIZES = {
    "mlp" => [784, 1024, 1024, 10],
    "chain66" => [784] + [64] * 65 + [10],
    # Gradients of 80 MiB, beside which everything else is small: for measuring memory.
    "wide" => [784, 4096, 4096, 10]
  }.freeze

  NAMES = [*CNN, *SIZES.keys].freeze

  # @param name [String] one of {NAMES}
  # @return [Torch::NN::Module] it takes images of 1 x 28 x 28 and gives logarithms of probabilities
  def self.build(name)
    return MNISTNet.new if CNN.include?(name)

    Chain.new(SIZES.fetch(name) { raise ArgumentError, "no model #{name.inspect}: expected one of #{NAMES.join(", ")}" })
  end
end
