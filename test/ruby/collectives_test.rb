# frozen_string_literal: true

require_relative "test_helper"

class CollectivesTest < Minitest::Test
  SIZES = [0, 1, 3, 127, 1031].freeze
  INTEGERS = %i[uint8 int8 int16 int32 int64].freeze
  FLOATS = %i[float16 bfloat16 float32 float64].freeze
  COMPLEX = %i[complex64 complex128].freeze

  # Small whole numbers, so that every dtype holds every sum and product exactly.
  def self.values(rank, count, modulus: 3)
    Array.new(count) { |i| (rank + i) % modulus + 1 }
  end

  EXPECTED = {
    sum: ->(all) { all.sum },
    product: ->(all) { all.inject(:*) },
    min: ->(all) { all.min },
    max: ->(all) { all.max },
    band: ->(all) { all.inject(:&) },
    bor: ->(all) { all.inject(:|) },
    bxor: ->(all) { all.inject(:^) }
  }.freeze

  def expected(op, size, count)
    columns = Array.new(size) { |rank| self.class.values(rank, count) }.transpose
    columns = [] if count.zero?
    columns.map { |column| EXPECTED.fetch(op).call(column) }
  end

  def each_case
    INTEGERS.product(EXPECTED.keys) { |dtype, op| yield dtype, op }
    FLOATS.product(%i[sum product min max]) { |dtype, op| yield dtype, op }
    COMPLEX.product(%i[sum product]) { |dtype, op| yield dtype, op }
  end

  def plain(numbers)
    numbers.map { |number| number.is_a?(Complex) ? number.real.to_i : number.to_i }
  end

  (1..4).each do |size|
    define_method(:"test_all_reduce_on_#{size}") do
      results = world(size) do |rank|
        said = {}
        each_case do |dtype, op|
          SIZES.each do |count|
            tensor = Torch.tensor(self.class.values(rank, count), dtype: :int64).to(dtype)
            returned = Distributed.all_reduce(tensor, op: op)
            said[[dtype, op, count]] = [returned.equal?(tensor), tensor.dtype, tensor.to(COMPLEX.include?(dtype) ? dtype : :float64).to_a]
          end
        end
        said
      end
      results.each do |said|
        each_case do |dtype, op|
          SIZES.each do |count|
            same, kept, values = said.fetch([dtype, op, count])
            assert same
            assert_equal dtype, kept
            assert_equal expected(op, size, count), plain(values), "#{dtype} #{op} #{count}"
          end
        end
      end
    end

    define_method(:"test_the_other_collectives_on_#{size}") do
      results = world(size) do |rank|
        (INTEGERS + FLOATS + [:bool]).to_h do |dtype|
          mine = Torch.tensor([rank, rank + 1, rank % 2]).to(dtype)
          sent = Torch.tensor([rank, 7, 1]).to(dtype)
          Distributed.broadcast(sent, src: size - 1)
          list = Array.new(size) { Torch.zeros(3).to(dtype) }
          Distributed.all_gather(list, mine)
          flat = Torch.zeros(size * 3).to(dtype)
          Distributed.all_gather_into_tensor(flat, mine)
          [dtype, [sent, *list, flat].map { |tensor| tensor.to(:float64).to_a }]
        end
      end
      results.each do |said|
        said.each do |dtype, (sent, *list, flat)|
          cut = ->(numbers) { (dtype == :bool) ? numbers.map { |number| number.clamp(0, 1) } : numbers }
          assert_equal cut.call([size - 1, 7, 1]), sent, dtype
          all = Array.new(size) { |rank| cut.call([rank, rank + 1, rank % 2]) }
          assert_equal all, list, dtype
          assert_equal all.flatten, flat, dtype
        end
      end
    end

    define_method(:"test_reduce_scatter_on_#{size}") do
      results = world(size) do |rank|
        parts = Array.new(size) { |part| Torch.tensor([[rank + part, 1.0], [part, rank]]) }
        output = Torch.zeros(2, 2)
        Distributed.reduce_scatter(output, parts)
        flat = Torch.zeros(2, dtype: :int64)
        Distributed.reduce_scatter_tensor(flat, Torch.tensor(Array.new(size * 2) { |i| i + rank }), op: :max)
        [output.to_a, flat.to_a]
      end
      ranks = (0...size).sum
      results.each_with_index do |(output, flat), rank|
        assert_equal [[ranks + size * rank, size], [size * rank, ranks]], output
        assert_equal [2 * rank, 2 * rank + 1].map { |i| i + size - 1 }, flat
      end
    end
  end

  def test_averages_and_scaled_sums
    results = world(3) do |rank|
      FLOATS.map do |dtype|
        average = Torch.tensor([rank.to_f, 3.0 * rank]).to(dtype)
        Distributed.all_reduce(average, op: Distributed::ReduceOp::AVG)
        scaled = Torch.tensor([rank + 1.0, -2.0]).to(dtype)
        Distributed.all_reduce(scaled, op: Distributed::ReduceOp.premul_sum(0.5))
        [average, scaled].map { |tensor| tensor.to(:float64).to_a }
      end
    end
    results.flatten(1).each { |said| assert_equal [[1.0, 3.0], [3.0, -3.0]], said }
  end

  def test_bools_are_combined_as_truths
    results = world(2) do |rank|
      %i[sum product band bxor].map do |op|
        tensor = Torch.tensor([true, rank.zero?, false])
        Distributed.all_reduce(tensor, op: op)
        tensor.to_a
      end
    end
    assert_equal [[true, true, false], [true, false, false], [true, false, false], [false, true, false]], results[0]
    assert_equal results[0], results[1]
  end

  def test_shapes_that_are_not_plain
    results = world(2) do |rank|
      scalar = Torch.tensor(rank + 1.0)
      Distributed.all_reduce(scalar)
      turned = Torch.arange(6, dtype: :float32).reshape([2, 3]).t
      Distributed.all_reduce(turned)
      column = Torch.zeros(3, 2)
      Distributed.broadcast(column.select(1, 1).fill!(rank + 5.0), src: 1)
      list = Array.new(2) { Torch.zeros(2, 2).select(1, 0) }
      Distributed.all_gather(list, Torch.tensor([[0.0, 9.0], [2.0, 9.0]]).select(1, 0).add!(rank))
      trained = Torch.ones(2, requires_grad: true)
      Distributed.all_reduce(trained)
      parameter = Torch::NN::Parameter.new(Torch.ones(2) * rank)
      Distributed.broadcast(parameter, src: 1)
      work = Distributed.all_reduce(later = Torch.ones(2, 2).select(1, 1), async_op: true)
      work.wait
      [scalar.item, turned.to_a, column.to_a, list.map(&:to_a), trained.to_a, parameter.to_a, later.to_a]
    end
    results.each do |said|
      assert_equal [3.0, [[0, 6], [2, 8], [4, 10]], [[0, 6]] * 3, [[0, 2], [1, 3]], [2, 2], [1, 1], [2, 2]], said
    end
  end

  def test_a_barrier_waits_for_the_last
    inside = Array.new(2) { Event.new }
    came, left = world(3) do |rank|
      Distributed.barrier
      rank.zero? ? inside.each(&:wait) : when_waiting { inside[rank - 1].set }
      here = now
      assert_nil Distributed.barrier
      [here, now]
    end.transpose
    assert_operator left.min, :>=, came.max
  end

  def test_a_monitored_barrier_names_those_who_do_not_come
    told = [0, 2].to_h { |rank| [rank, Event.new] }
    said = world(4) do |rank|
      Distributed.monitored_barrier(timeout: 20)
      all = failure { Distributed.monitored_barrier(timeout: 2, wait_all_ranks: true) } if rank.even?
      told[rank]&.set
      # Ranks that leave early are named as lost.
      told.each_value(&:wait)
      all
    end
    said.values_at(0, 2).each do |error, text|
      assert_equal "Torch::Distributed::TimeoutError", error
      assert_match(/1.*3/, text)
    end
  end

  def test_a_monitored_barrier_waits
    inside = Event.new
    came, left, sums = world(3) do |rank|
      when_waiting { inside.set } if rank.zero?
      inside.wait if rank == 1
      here = now
      assert_nil Distributed.monitored_barrier
      [here, now, Distributed.all_reduce(Torch.ones(1)).item]
    end.transpose
    assert_equal [3.0] * 3, sums
    assert_operator left.min, :>=, came.max
  end

  def test_wrong_arguments_are_named
    alone do
      one = Torch.ones(3)
      {
        /tensor: expected a Torch::Tensor, got 3 \(Integer\)/ => -> { Distributed.all_reduce(3) },
        /op: expected one of :sum, .*got :add/ => -> { Distributed.all_reduce(one, op: :add) },
        /op: .*got 9/ => -> { Distributed.all_reduce(one, op: 9) },
        /premul_sum\(0\.5\)/ => -> { Distributed.all_reduce(one, op: :premul_sum) },
        /src: expected a rank from 0 to 0, got 1/ => -> { Distributed.broadcast(one, src: 1) },
        /src: .*got nil/ => -> { Distributed.broadcast(one, src: nil) },
        /group: expected .*, got 7/ => -> { Distributed.barrier(group: 7) },
        /tensor_list: expected an Array of 1 tensors.*got 2/ => -> { Distributed.all_gather([one, one], one) },
        /tensor_list\[0\]: expected float32 of shape \[3\] like tensor, got float64 of shape \[3\]/ =>
          -> { Distributed.all_gather([one.double], one) },
        /all_gather.*output.*6|6.*elements/ => -> { Distributed.all_gather_into_tensor(Torch.ones(6), one) },
        /bitwise|band|BAND|reduce float32/ => -> { Distributed.all_reduce(one, op: :band) },
        /sparse/ => -> { Distributed.all_reduce(Torch.eye(2).to_sparse) }
      }.each do |text, call|
        assert_match text, failure(&call)&.last.to_s
      end
    end
  end

  def test_operations_go_by_number_name_and_symbol
    ops = Distributed::ReduceOp
    assert_equal [0, 1, 2, 3, 4, 5, 6, 7, 8],
      [ops::SUM, ops::AVG, ops::PRODUCT, ops::MIN, ops::MAX, ops::BAND, ops::BOR, ops::BXOR, ops::PREMUL_SUM]
    [ops::MAX, :max, "max", "MAX"].each { |op| assert_equal [4, 0.0], ops.resolve(op) }
    assert_equal [[2, 0.0], [1, 0.0], [8, 0.25]], [:prod, "mean", ops.premul_sum(0.25)].map { |op| ops.resolve(op) }
  end

  def test_ranks_that_disagree_are_told_both_sides
    said = world(2) { |rank| failure { Distributed.all_reduce(Torch.ones(3 + rank)) } }
    said.each do |name, text|
      assert_equal "Torch::Distributed::MismatchError", name
      assert_match(/3/, text)
      assert_match(/4/, text)
    end
  end
end
