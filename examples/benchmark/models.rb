# frozen_string_literal: true

require "torch/distributed"
require_relative "../mnist/model"

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

  # The network of the MNIST example, under both its names here.
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
