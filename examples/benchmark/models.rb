# frozen_string_literal: true

require "torch"

# The models of the step benchmark. The same stand in ddp_step.py for PyTorch.
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
      (0..@last).each do |i|
        x = instance_variable_get("@fc#{i}").call(x)
        x = Torch::NN::F.relu(x) if i < @last
      end
      x
    end
  end

  SIZES = {
    "mlp" => [784, 1024, 1024, 10],
    "chain66" => [784] + [64] * 65 + [10]
  }.freeze

  # @param name [String] a key of {SIZES}
  # @return [Torch::NN::Module, Integer] the model and the width of its input
  def self.build(name)
    sizes = SIZES.fetch(name) { abort "no model #{name.inspect}: expected one of #{SIZES.keys.join(", ")}" }
    [Chain.new(sizes), sizes.first]
  end
end
