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

  # How many operations of the default group the block makes on this rank.
  def operations
    before = Distributed.barrier(async_op: true).tap(&:wait).sequence
    yield
    Distributed.barrier(async_op: true).tap(&:wait).sequence - before - 1
  end

  def test_collectives_are_counted
    counts = world(2) do |rank|
      layers = layers_of(2, rank)
      {plain: nil, sequence: 0}.transform_values do |dim|
        input = leaf(numbers([12, IN], rank))
        result = nil
        forward = operations { result = mlp(input, layers, sequence_dim: dim) }
        first = mlp(input.detach, layers, sequence_dim: dim)
        [forward, operations { result.sum.backward }, operations { first.sum.backward }]
      end
    end
    counts.each { |count| assert_equal({plain: [1, 1, 0], sequence: [2, 2, 1]}, count) }
  end

  # Rank 1 joins the input's gradient once rank 0 has computed the weight's, which is most of what backward allocates.
  def test_weights_gradients_are_computed_while_the_inputs_is_reduced
    computed = Event.new
    found = world(2) do |rank|
      input, weight = leaf(numbers([2, 8], 1)), leaf(numbers([1024, 8], 2))
      result = NN.column_linear(input, weight).sum
      if rank == 1
        computed.wait
        result.backward
      else
        before = Distributed.memory_stats[:current_bytes]
        backward = Thread.new { result.backward }
        await("the weight's gradient") { Distributed.memory_stats[:current_bytes] - before >= 1024 * 8 * 8 }
        early = input.grad.nil?
        computed.set
        backward.join
      end
      [early, input.grad.shape]
    end
    assert_equal [[true, [2, 8]], [nil, [2, 8]]], found
  end

  # --- what has no gradient, and several backwards ---

  def test_only_what_requires_a_gradient_has_one
    found = world(2) do |rank|
      [true, false].repeated_permutation(5).reject(&:none?).flat_map do |required|
        expected = gradients_of(required, 2, rank) { |input, layers| mlp(input, layers) }
        full = full_layers.map(&:clone)
        given = [numbers([3, IN], 5)] + full
        given.zip(required) { |tensor, requires| tensor.requires_grad! if requires }
        full_mlp(*given.first(1), full).pow(2).sum.backward
        given.zip(expected, [nil, 0, 0, 1, nil]).map do |tensor, grad, dim|
          tensor.grad.nil? == grad.nil? && (grad.nil? || difference(part(tensor.grad, dim, 2, rank), grad) < 1e-12)
        end
      end
    end
    assert found.flatten.all?
  end

  def gradients_of(required, size, rank)
    given = [numbers([3, IN], 5)] + layers_of(size, rank).map(&:detach)
    given.zip(required) { |tensor, requires| tensor.requires_grad! if requires }
    yield(given.first, given.drop(1)).pow(2).sum.backward
    given.map(&:grad)
  end

  def test_backward_again_and_in_a_checkpointed_segment
    found = world(2) do |rank|
      runs = Array.new(3) { [leaf(numbers([12, IN], rank)), layers_of(2, rank)] }
      mlp(*runs[0], sequence_dim: 0).pow(2).sum.backward
      loss = mlp(*runs[1], sequence_dim: 0).pow(2).sum
      2.times { |i| loss.backward(retain_graph: i.zero?) }
      again = failure { loss.backward }
      Torch::Utils::Checkpoint.checkpoint(runs[2][0]) { |input| mlp(input, runs[2][1], sequence_dim: 0) }.pow(2).sum.backward
      once, twice, segment = runs.map { |input, layers| [input, *layers].map(&:grad) }
      without = Torch.no_grad { mlp(*runs[0]) }
      [once.zip(twice).all? { |one, two| same_bits?(one * 2, two) }, once.zip(segment).all? { |one, two| same_bits?(one, two) },
        again, without.requires_grad]
    end
    found.each do |twice, segment, again, required|
      assert_equal [true, true, false], [twice, segment, required]
      assert_match(/backward through the graph a second time/, again.last)
    end
  end

  # --- weights' gradients, later ---

  Deferred = Torch::Distributed::WeightGradients

  def test_deferred_gradients_have_the_same_bits
    found = world(2) do |rank|
      [nil, 0].flat_map do |dim|
        now, later = Array.new(2) { [leaf(numbers([12, IN], rank)), layers_of(2, rank)] }
        2.times { mlp(*now, sequence_dim: dim).pow(2).sum.backward }
        parts = Array.new(2) { Deferred.defer { mlp(*later, sequence_dim: dim).pow(2).sum.backward } }
        before = later[1].map(&:grad)
        parts.each { |part| 2.times { part.run } }
        [before.none?, same_bits?(now[0].grad, later[0].grad)] + now[1].zip(later[1]).map { |one, two| same_bits?(one.grad, two.grad) }
      end
    end
    assert found.flatten.all?
  end

  def test_what_is_not_deferred
    found = Distributed.fork_world(1) do
      weight = leaf(numbers([4, IN], 1))
      bias = leaf(numbers([4], 2))
      input = leaf(numbers([3, IN], 3))
      other = leaf(numbers([4, IN], 4))
      Deferred.defer { (NN.linear(input, weight * 2, bias) + F.linear(input, other, nil)).sum.backward }.run
      computed = [weight, bias, input, other].map { |tensor| tensor.grad.to_a }
      frozen = Deferred.defer { NN.linear(input, weight.detach, bias).sum.backward }
      before = bias.grad.to_a
      frozen.run
      thread = Thread.new { Deferred.defer { Thread.new { NN.linear(input, other).sum.backward }.join } }
      thread.value
      Deferred.defer { NN.linear(input, other).sum.backward(create_graph: true) }
      [computed, before, bias.grad.to_a, other.grad.to_a]
    end.first
    rows = numbers([3, IN], 3).sum(0).to_a
    input_grad = (numbers([4, IN], 1) * 2 + numbers([4, IN], 4)).sum(0).to_a
    assert_near [[rows.map { |x| 2 * x }] * 4, [3.0] * 4, [input_grad] * 3, [rows] * 4], found[0]
    assert_equal [[3.0] * 4, [6.0] * 4], found[1, 2]
    assert_near [rows.map { |x| 3 * x }] * 4, found[3]
  end

  def assert_near(expected, found)
    expected.flatten.zip(found.flatten) { |one, other| assert_in_delta one, other, 1e-12 }
  end

  # The inner block's object gets what is deferred in it; one that an exception leaves drops it; changes in place are noticed.
  def test_blocks_that_defer
    found = Distributed.fork_world(1) do
      weights = Array.new(3) { |i| leaf(numbers([4, IN], i)) }
      input = numbers([3, IN], 3)
      inner = nil
      outer = Deferred.defer do
        inner = Deferred.defer { NN.linear(input, weights[0]).sum.backward }
        NN.linear(input, weights[1]).sum.backward
      end
      inner.run
      states = [weights.map { |weight| !weight.grad.nil? }]
      outer.run
      states << weights.map { |weight| !weight.grad.nil? }
      dropped = failure { Deferred.defer { NN.linear(input, weights[2]).sum.backward || raise("left") } }
      NN.linear(input, weights[2]).sum.backward
      states << same_bits?(weights[1].grad, weights[2].grad)
      changed = Deferred.defer { NN.linear(input, weights[0]).sum.backward }
      input.add!(1)
      states + [dropped, failure { changed.run }, failure { changed.run }, failure { Deferred.defer }]
    end.first
    assert_equal [[true, false, false], [true, true, false], true], found.first(3)
    assert_equal ["RuntimeError", "left"], found[3]
    assert_match(/modified by an inplace operation/, found[4].last)
    assert_nil found[5]
    assert_equal "LocalJumpError", found[6].first
  end

  # A model of linear layers of which one is used twice.
  class Tied < Torch::NN::Module
    def initialize
      super
      @first = Torch::NN::Linear.new(IN, IN)
      @second = Torch::NN::Linear.new(IN, 3)
    end

    def forward(input)
      hidden = NN.linear(input, @first.weight, @first.bias)
      hidden = F.linear(Torch.tanh(hidden), @first.weight, nil)
      NN.linear(Torch.tanh(hidden), @second.weight, @second.bias)
    end
  end

  def test_deferred_gradients_are_reduced_by_data_parallel_training
    found = world(2) do |rank|
      Torch.manual_seed(1)
      models = Array.new(2) { Torch::NN::Parallel::DistributedDataParallel.new(Tied.new) }
      models[1].load_state_dict(models[0].state_dict)
      3.times do |step|
        input = numbers([4, IN], 10 * step + rank, :float32)
        models[0].call(input).pow(2).sum.backward
        Deferred.defer { models[1].call(input).pow(2).sum.backward }.run
      end
      grads = models.map { |model| model.parameters.map(&:grad) }
      [grads.transpose.all? { |one, other| difference(one, other) < 1e-6 }, grads[1].map(&:to_a)]
    end
    assert found.all?(&:first)
    assert_equal found[0][1], found[1][1]
  end

  # Before anything is sent.
  def test_arguments_that_do_not_fit
    input = Torch.ones(2, 3, 4)
    weight = Torch.ones(6, 4)
    found = world(2) do
      {
        /expected a Torch::Tensor, got 1/ => -> { NN.linear(input, 1) },
        /weight: expected \[out, features\], got the shape \[4\]/ => -> { NN.column_linear(input, Torch.ones(4)) },
        /input: expected \[..., 4\] for a weight of the shape \[6, 4\], got the shape \[2, 5\]/ => -> { NN.row_linear(Torch.ones(2, 5), weight) },
        /bias: expected \[6\] for a weight of the shape \[6, 4\], got the shape \[4\]/ => -> { NN.linear(input, weight, Torch.ones(4)) },
        /weight: expected the input's dtype and device, Float on cpu, got Double/ => -> { NN.linear(input, weight.to(dtype: :float64)) },
        /expected a floating-point tensor, got the dtype Long/ => -> { NN.linear(Torch.ones(2, 4, dtype: :int64), weight) },
        /sequence_dim: 3: expected a dimension of a tensor of shape \[2, 3, 4\]/ => -> { NN.column_linear(input, weight, sequence_dim: 3) },
        /sequence dimension 2: expected one before the last/ => -> { NN.column_linear(input, weight, sequence_dim: -1) },
        /dimension 1 of \[2, 3, 4\], the sequence, is not divisible by 2/ => -> { NN.row_linear(input, weight, sequence_dim: 1) }
      }.to_a.map { |pattern, call| [pattern.source, failure(&call)] }
    end
    found.flatten(1).each do |pattern, (kind, text)|
      assert_match Regexp.new(pattern), text
      assert_includes %w[ArgumentError TypeError Torch::Distributed::InvalidArgumentError], kind
    end
  end
end
