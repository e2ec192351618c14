# frozen_string_literal: true

# Points on two spirals that wind around each other: small data that a network must bend for.
module Spirals
  TURNS = 1.5

  module_function

  # @return [Array(Torch::Tensor, Torch::Tensor)] count points of two coordinates, and which spiral each is on
  def points(count, seed:)
    random = Random.new(seed)
    rows = Array.new(count) do |i|
      radius = Math.sqrt(random.rand)
      angle = radius * TURNS * 2 * Math::PI + (i % 2) * Math::PI
      [radius * Math.cos(angle) + random.rand(-0.02..0.02), radius * Math.sin(angle) + random.rand(-0.02..0.02)]
    end
    [Torch.tensor(rows, dtype: :float32), Torch.tensor(Array.new(count) { |i| i % 2 }, dtype: :int64)]
  end

  def net
    Torch::NN::Sequential.new(Torch::NN::Linear.new(2, 64), Torch::NN::Tanh.new, Torch::NN::Linear.new(64, 64), Torch::NN::Tanh.new,
      Torch::NN::Linear.new(64, 2))
  end
end
