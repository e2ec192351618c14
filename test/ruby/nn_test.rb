# frozen_string_literal: true

require_relative "test_helper"

# Collectives with a gradient: their values by formula; their gradients by what defines them. All of them are linear, so
# for any x and w the sum over all ranks of <w, f(x)> is that of <x, gradient>.
class NNTest < Minitest::Test
  F = Torch::Distributed::NN

  def numbers(shape, seed)
    values = (Torch.arange(0, shape.inject(1, :*), dtype: :float64) * 0.731 + seed * 1.37).sin
    values.reshape(shape)
  end

  def input(shape, rank, seed = 0)
    numbers(shape, rank + 10 * seed).requires_grad!
  end

  def dot(one, other)
    (one.detach * other.detach).sum.item
  end

  # Both sides of the equation above, of this rank.
  def sides(shapes, rank)
    inputs = shapes.each_with_index.map { |shape, i| input(shape, rank, i) }
    result = yield inputs
    outputs = result.is_a?(Array) ? result : [result]
    weights = outputs.each_with_index.map { |output, i| numbers(output.shape, 100 + 7 * rank + i) }
    outputs.zip(weights).map { |output, weight| (output * weight).sum }.inject(:+).backward
    [outputs.zip(weights).sum { |pair| dot(*pair) }, inputs.sum { |x| x.grad ? dot(x, x.grad) : 0 }]
  end

  ONE = ->(_size, _rank) { [[3, 2]] }
  LIST = ->(size, _rank) { Array.new(size) { [2, 3] } }
  COUNTS = ->(from, to) { (from * 2 + to * 3) % 4 }

  FUNCTIONS = {
    all_reduce: [ONE, ->(_size, _rank, x) { F.all_reduce(x[0]) }],
    all_reduce_of_a_scalar: [->(_size, _rank) { [[]] }, ->(_size, _rank, x) { F.all_reduce(x[0]) }],
    mean: [ONE, ->(_size, _rank, x) { F.all_reduce(x[0], op: :avg) }],
    reduce: [ONE, ->(size, _rank, x) { F.reduce(x[0], dst: size - 1, op: :avg) }],
    broadcast: [ONE, ->(size, _rank, x) { F.broadcast(x[0], src: size - 1) }],
    all_gather: [ONE, ->(_size, _rank, x) { F.all_gather(x[0]) }],
    gather: [ONE, ->(size, _rank, x) { F.gather(x[0], dst: size - 1) }],
    scatter: [LIST, ->(size, _rank, x) { F.scatter(x, src: size - 1) }],
    reduce_scatter: [LIST, ->(_size, _rank, x) { F.reduce_scatter(Torch.empty([2, 3], dtype: :float64), x, op: :avg) }],
    all_to_all_single: [
      ->(_size, _rank) { [[12, 2]] }, ->(_size, _rank, x) { F.all_to_all_single(Torch.empty([12, 2], dtype: :float64), x[0]) }
    ],
    all_to_all: [
      ->(size, rank) { Array.new(size) { |to| [COUNTS.call(rank, to), 3] } },
      lambda do |size, rank, x|
        F.all_to_all(Array.new(size) { |from| Torch.empty([3, COUNTS.call(from, rank)], dtype: :float64) }, x)
      end
    ],
    uneven_all_to_all_single: [
      ->(size, rank) { [[(0...size).sum { |to| COUNTS.call(rank, to) }, 2]] },
      lambda do |size, rank, x|
        come = (0...size).map { |from| COUNTS.call(from, rank) }
        F.all_to_all_single(Torch.empty([come.sum, 2], dtype: :float64), x[0], output_split_sizes: come,
          input_split_sizes: (0...size).map { |to| COUNTS.call(rank, to) })
      end
    ],
    of_a_transposed_tensor: [ONE, ->(_size, _rank, x) { F.all_reduce(x[0].transpose(0, 1)) }]
  }.freeze

  (1..4).each do |size|
    define_method(:"test_gradients_on_#{size}_ranks") do
      results = world(size) do |rank|
        FUNCTIONS.transform_values do |shapes, function|
          sides(shapes.call(size, rank), rank) { |inputs| function.call(size, rank, inputs) }
        end
      end
      FUNCTIONS.each_key do |name|
        left, right = results.map { |result| result[name] }.transpose.map(&:sum)
        assert_in_delta left, right, 1e-9 * (1 + left.abs), name.to_s
      end
    end
  end

  def test_values
    results = world(3) do |rank|
      x = Torch.tensor([rank + 1.0, 10.0 * (rank + 1)]).requires_grad!
      rows = Torch.arange(0, 6, dtype: :float32).reshape(3, 2) + 100 * rank
      sums = Torch.zeros(2)
      come = Torch.zeros(3, 2)
      {
        all_reduce: F.all_reduce(x), mean: F.all_reduce(x, op: :avg), reduce: F.reduce(x, dst: 1), broadcast: F.broadcast(x, src: 2),
        all_gather: Torch.stack(F.all_gather(x)), gather: Torch.stack(F.gather(x, dst: 1)),
        scatter: F.scatter(Array.new(3) { |i| rows[i] }, src: 1), reduce_scatter: F.reduce_scatter(sums, Array.new(3) { |i| rows[i] }),
        all_to_all_single: F.all_to_all_single(come, rows), untouched: x, sums: sums, come: come
      }.transform_values { |tensor| tensor.detach.to_a }
    end
    results.each_with_index do |found, rank|
      assert_equal [6.0, 60.0], found[:all_reduce]
      assert_equal [2.0, 20.0], found[:mean]
      assert_equal (rank == 1) ? [6.0, 60.0] : [0.0, 0.0], found[:reduce]
      assert_equal [3.0, 30.0], found[:broadcast]
      assert_equal [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]], found[:all_gather]
      assert_equal (rank == 1) ? [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]] : [[0.0, 0.0]] * 3, found[:gather]
      assert_equal [100.0 + 2 * rank, 101.0 + 2 * rank], found[:scatter]
      assert_equal [300.0 + 6 * rank, 303.0 + 6 * rank], found[:reduce_scatter]
      assert_equal Array.new(3) { |from| [100.0 * from + 2 * rank, 100.0 * from + 2 * rank + 1] }, found[:all_to_all_single]
      assert_equal [rank + 1.0, 10.0 * (rank + 1)], found[:untouched]
      assert_equal [found[:reduce_scatter], found[:all_to_all_single]], [found[:sums], found[:come]]
    end
  end

  # A model that is divided between the ranks is the whole one: a column of the first layer and a row of the second on each.
  def test_regions_make_a_divided_model_equal_the_whole
    whole = Distributed.fork_world(1) do
      x, first, second = parts_of_model
      Torch.tanh(x.matmul(first)).matmul(second).pow(2).sum.backward
      [x, first, second].map { |tensor| tensor.grad.to_a }
    end.first
    results = world(2) do |rank|
      x, first, second = parts_of_model
      hidden = Torch.tanh(F.copy_to_region(x).matmul(first.narrow(1, 2 * rank, 2)))
      F.reduce_from_region(hidden.matmul(second.narrow(0, 2 * rank, 2))).pow(2).sum.backward
      [x, first, second].map { |tensor| tensor.grad.to_a }
    end
    results.each { |grads| assert_all_near whole[0], grads[0] }
    [1, 2].each { |i| assert_all_near whole[i].flatten, results.map { |grads| grads[i].flatten }.transpose.map(&:sum) }
  end

  def parts_of_model
    [input([3, 5], 0), input([5, 4], 1), input([4, 2], 2)]
  end

  def assert_all_near(expected, got)
    expected.flatten.zip(got.flatten) { |one, other| assert_in_delta one, other, 1e-9 }
  end

  # The last dimension is divided within the region, then the first.
  def test_regions_scatter_and_gather
    results = world(2) do |rank|
      x = input([4, 6], 0)
      part = F.scatter_to_region(x)
      back = F.gather_from_region(part * (rank + 1.0))
      weights = numbers([4, 6], 5)
      (back * weights).sum.backward
      sum = F.reduce_scatter_to_region(x.detach.clone.requires_grad!, dim: 0)
      [part.shape, part.detach.to_a, back.detach.to_a, x.grad.to_a, sum.detach.to_a]
    end
    x = numbers([4, 6], 0)
    scaled = Torch.cat([x.narrow(1, 0, 3), x.narrow(1, 3, 3) * 2], 1)
    weights = numbers([4, 6], 5)
    gradient = Torch.cat([weights.narrow(1, 0, 3), weights.narrow(1, 3, 3) * 2], 1)
    results.each_with_index do |(shape, part, back, grad, sum), rank|
      assert_equal [4, 3], shape
      assert_all_near x.narrow(1, 3 * rank, 3).to_a, part
      assert_all_near scaled.to_a, back
      assert_all_near gradient.to_a, grad
      assert_all_near (x * 2).narrow(0, 2 * rank, 2).to_a, sum
    end
  end

  # The gradient has a graph as well: of y = the sum of all x, and the loss y * y on each of n ranks, it is 2 n y, and the
  # sum over the ranks of v times it has the gradient 2 n times all v.
  def test_second_derivatives
    results = world(3) do |rank|
      x = input([4], rank)
      y = F.all_reduce(x)
      (y * y).sum.backward(create_graph: true)
      first = x.grad.detach.clone
      (x.grad * numbers([4], 50 + rank)).sum.backward
      [y.detach.to_a, first.to_a, (x.grad.detach - first).to_a]
    end
    all = (0...3).map { |rank| numbers([4], 50 + rank) }.inject(:+) * 6
    results.each do |y, first, second|
      assert_all_near y.map { |value| 6 * value }, first
      assert_all_near all.to_a, second
    end
  end

  def test_backward_twice_and_no_grad
    results = world(2) do |rank|
      x = input([3], rank)
      y = F.all_gather(x).inject(:+)
      2.times { y.sum.backward(retain_graph: true) }
      quiet = Torch.no_grad { F.all_reduce(x) }
      [x.grad.to_a, quiet.requires_grad, F.all_reduce(Torch.tensor([rank, 1])).to_a]
    end
    results.each { |grad, requires_grad, integers| assert_equal [[4.0] * 3, false, [1, 2]], [grad, requires_grad, integers] }
  end

  def test_mistakes
    results = world(2) do
      [
        -> { F.all_reduce(Torch.ones(2), op: :max) },
        -> { F.all_reduce([1]) },
        -> { F.all_reduce(Torch.tensor([1, 2]), op: :avg) },
        -> { F.scatter_to_region(Torch.ones(2, 3)) },
        -> { F.scatter_to_region(Torch.ones(2, 3), dim: 2) },
        -> { F.broadcast(Torch.ones(2), src: 2) },
        -> { F.scatter([Torch.ones(2)]) },
        -> { F.scatter([Torch.ones(2), Torch.ones(3)]) },
        -> { F.reduce_scatter(Torch.ones(3), [Torch.ones(2)] * 2) },
        -> { F.all_to_all_single(Torch.ones(4), Torch.ones(3)) },
        -> { F.all_to_all_single(Torch.ones(2), Torch.ones(3), input_split_sizes: [1, 1]) },
        -> { F.all_to_all_single(Torch.ones(2), Torch.ones(3), input_split_sizes: [3]) },
        -> { F.all_to_all_single(Torch.ones(2), Torch.ones(3), input_split_sizes: [4, -1]) },
        -> { F.all_to_all([Torch.ones(1)], [Torch.ones(1)] * 2) }
      ].map do |mistake|
        mistake.call
        "nothing"
      rescue => error
        "#{error.class}: #{error.message}"
      end
    end
    expected = [
      /ArgumentError: all_reduce: op: :max: expected SUM or AVG/, /TypeError: tensor: expected a Torch::Tensor, got \[1\]/,
      /a mean of integers/, /slice: the first dimension of \[3, 2\] is not divisible by 2/, /dim: 2: expected a dimension/,
      /src: expected a rank from 0 to 1, got 2/, /tensors: expected 2 tensors of one shape/, /tensors: expected 2 tensors of one shape.*\[2\], \[3\]/,
      /output: expected a tensor of shape \[2\], got \[3\]/, /input: expected rows that 2 ranks can share, got 3/,
      *[/input_split_sizes: expected 2 numbers that add up to 3/] * 3, /output_tensor_list: expected 2 tensors, one for each rank, got 1/
    ]
    results.each { |texts| expected.zip(texts) { |pattern, text| assert_match pattern, text } }
  end

  # What comes into a region waits for nobody; its gradient does.
  def test_a_rank_that_has_died_is_named_by_backward
    said = without(2) do |rank|
      x = input([2], rank)
      F.copy_to_region(x).sum.backward
    end
    said.each { |(_, text), _| assert_match(/rank 2/, text) }
  end
end
