# frozen_string_literal: true

require_relative "test_helper"

# Linear layers that are divided between ranks, against Torch::NN::Functional.linear on the complete tensors, and weights'
# gradients that are computed later.
class ParallelLinearTest < Minitest::Test
  NN = Torch::Distributed::NN
  F = Torch::NN::Functional

  # Two layers, in → hidden → out; 12 is divisible by 1 to 4.
  IN = 5
  HIDDEN = 12
  OUT = 7

  def numbers(shape, seed, dtype = :float64)
    (Torch.arange(0, shape.inject(1, :*), dtype: :float64) * 0.731 + seed * 1.37).sin.reshape(shape).to(dtype: dtype)
  end

  def leaf(tensor)
    tensor.detach.contiguous.clone.requires_grad!
  end

  def part(tensor, dim, size, rank)
    return tensor unless dim

    count = tensor.shape[dim] / size
    tensor.narrow(dim, rank * count, count)
  end

  # The largest one, relative to the largest number.
  def difference(expected, found)
    raise "shapes #{expected.shape} and #{found.shape}" unless expected.shape == found.shape

    expected.numel.zero? ? 0.0 : (expected.detach - found.detach).abs.max.item / (expected.detach.abs.max.item + 1e-3)
  end

  def same_bits?(one, other)
    one.shape == other.shape && one.dtype == other.dtype && Torch.equal(one.detach, other.detach)
  end

  def full_layers
    [numbers([HIDDEN, IN], 1), numbers([HIDDEN], 2), numbers([OUT, HIDDEN], 3), numbers([OUT], 4)]
  end

  def layers_of(size, rank)
    up, up_bias, down, down_bias = full_layers
    [part(up, 0, size, rank), part(up_bias, 0, size, rank), part(down, 1, size, rank), down_bias].map { |tensor| leaf(tensor) }
  end

  def mlp(input, layers, sequence_dim: nil)
    hidden = Torch.tanh(NN.column_linear(input, layers[0], layers[1], sequence_dim: sequence_dim))
    NN.row_linear(hidden, layers[2], layers[3], sequence_dim: sequence_dim)
  end

  def full_mlp(input, layers)
    F.linear(Torch.tanh(F.linear(input, layers[0], layers[1])), layers[2], layers[3])
  end

  # What this rank has of the gradients of the complete layers.
  def parts_of_gradients(layers, size, rank)
    [0, 0, 1, nil].each_with_index.map { |dim, i| part(layers[i].grad, dim, size, rank) }
  end

  # The largest difference of results and gradients to those of one process, for a loss that depends on each result.
  def differences(shape, sequence_dim, size, rank)
    full = full_layers.map { |tensor| leaf(tensor) }
    whole = leaf(numbers(shape, 5))
    expected = full_mlp(whole, full)
    weights = numbers(expected.shape, 6)
    (expected * weights).sum.backward

    layers = layers_of(size, rank)
    input = leaf(part(whole, sequence_dim, size, rank))
    result = mlp(input, layers, sequence_dim: sequence_dim)
    (result * part(weights, sequence_dim, size, rank)).sum.backward
    [difference(part(expected, sequence_dim, size, rank), result), difference(part(whole.grad, sequence_dim, size, rank), input.grad)] +
      layers.zip(parts_of_gradients(full, size, rank)).map { |layer, grad| difference(grad, layer.grad) }
  end

  SHAPES = [[[3, IN], nil], [[IN], nil], [[2, 3, IN], nil], [[12, IN], 0], [[12, 2, IN], 0], [[2, 12, IN], 1], [[2, 3, 12, IN], 2],
    [[0, IN], nil], [[12, 0, IN], 0]].freeze

  (1..4).each do |size|
    define_method(:"test_a_divided_mlp_on_#{size}_ranks_is_the_complete_one") do
      results = world(size) do |rank|
        SHAPES.map { |shape, sequence_dim| differences(shape, sequence_dim, size, rank) }
      end
      results.flatten.each { |found| assert_operator found, :<, 1e-12 }
    end
  end

  def test_gradients_of_gradients
    results = world(3) { |rank| [nil, 0, 1].map { |dim| second_differences(dim, 3, rank) } }
    results.flatten.each { |found| assert_operator found, :<, 1e-12 }
  end

  # Gradients of the squares of the first gradients, likewise.
  def second_differences(sequence_dim, size, rank)
    full = full_layers.map { |tensor| leaf(tensor) }
    whole = leaf(numbers([12, 12, IN], 5))
    second_gradients([whole] + full) { full_mlp(whole, full) }

    layers = layers_of(size, rank)
    input = leaf(part(whole, sequence_dim, size, rank))
    second_gradients([input] + layers) { mlp(input, layers, sequence_dim: sequence_dim) }
    [difference(part(whole.grad, sequence_dim, size, rank), input.grad)] +
      layers.zip(parts_of_gradients(full, size, rank)).map { |layer, grad| difference(grad, layer.grad) }
  end

  def second_gradients(leaves)
    yield.pow(2).sum.backward(create_graph: true)
    first = leaves.map(&:grad)
    leaves.each { |tensor| tensor.grad = nil }
    first.map { |grad| grad.pow(2).sum }.inject(:+).backward
  end

  # --- numerics, and what needs no gradient ---

  VARIANTS = {
    matrix: -> { numbers([32, 16], 1) }, vector: -> { numbers([16], 1) }, batches: -> { numbers([4, 8, 16], 1) },
    more_batches: -> { numbers([2, 3, 4, 16], 1) }, empty: -> { numbers([0, 16], 1) }, slices: -> { numbers([32, 20], 1).narrow(1, 2, 16) },
    transposed: -> { numbers([16, 32], 1).transpose(0, 1) }, transposed_batches: -> { numbers([8, 4, 16], 1).transpose(0, 1) }
  }.freeze

  def test_linear_has_the_bits_of_torchs
    different = Distributed.fork_world(1) do
      VARIANTS.keys.product(%i[float32 float64 bfloat16], [true, false]).reject do |name, dtype, bias|
        tensors = [instance_exec(&VARIANTS[name]), numbers([24, 16], 2)] + (bias ? [numbers([24], 3)] : [])
        ours, torchs = Array.new(2) { tensors.map { |tensor| tensor.to(dtype: dtype).detach.requires_grad! } }
        results = [NN.linear(*ours), F.linear(torchs[0], torchs[1], torchs[2])]
        results.each { |result| (result * numbers(result.shape, 4).to(dtype: dtype)).sum.backward }
        same_bits?(*results) && ours.zip(torchs).all? { |one, other| same_bits?(one.grad, other.grad) }
      end
    end
    assert_empty different.first
  end
end
