# frozen_string_literal: true

require_relative "test_helper"

# Operations with a piece for each rank, of one size or several.
#
# torch-rb 0.12 makes uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64, complex64, complex128 and
# bool tensors, all of which travel. It also makes complex32, which is refused.
class PiecesTest < Minitest::Test
  DTYPES = %i[uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 bool].freeze

  # What rank `from` gives to rank `to`.
  def self.piece(from, to, count = 3)
    Array.new(count) { |i| (from * 5 + to * 2 + i) % 7 }
  end

  def self.tensor(numbers, dtype = :float32)
    Torch.tensor(numbers, dtype: :int64).to(dtype)
  end

  def self.plain(tensor)
    return tensor.to_a.flatten.map { |number| number.real.to_i } if %i[complex64 complex128].include?(tensor.dtype)

    tensor.to(:int64).to_a.flatten
  end

  def piece(...) = self.class.piece(...)

  def tensor(...) = self.class.tensor(...)

  def plain(...) = self.class.plain(...)

  def zeros(count, dtype = :float32)
    Torch.zeros([count]).to(dtype)
  end

  # Runs an operation both ways, each time with outputs of its own.
  def both_ways
    [false, true].map do |async_op|
      outputs, work = yield async_op
      work.wait if async_op
      outputs.map { |output| plain(output) }
    end
  end

  (1..4).each do |size|
    define_method(:"test_every_dtype_on_#{size}") do
      results = world(size) do |rank|
        DTYPES.to_h { |dtype| [dtype, exchange(dtype, rank, size)] }
      end
      results.each_with_index do |said, rank|
        DTYPES.each do |dtype|
          cut = ->(numbers) { (dtype == :bool) ? numbers.map { |number| number.clamp(0, 1) } : numbers }
          assert_equal expected_exchange(rank, size).transform_values { |lists| lists.map(&cut) }, said[dtype], dtype
        end
      end
    end

    define_method(:"test_pieces_of_several_sizes_on_#{size}") do
      results = world(size) { |rank| uneven(rank, size) }
      results.each_with_index do |said, rank|
        gathered = Array.new(size) { |from| piece(from, 0, from + 1) }
        assert_equal [gathered, gathered], said[:all_gather]
        roots = (0...size).map { |root| (root == rank) ? gathered : [] }
        assert_equal roots, said[:gather]
        assert_equal((0...size).map { |root| piece(root, rank, rank) }, said[:scatter])
        assert_equal Array.new(size) { |from| piece(from, rank, (from + rank) % 3) }, said[:all_to_all]
        sums = Array.new(size) { |from| piece(from, rank, rank + 1) }.transpose.map(&:sum)
        assert_equal [sums, sums], said[:reduce_scatter]
        splits = Array.new(size) { |from| Array.new((from + 2 * rank) % 3) { |i| [from * 10 + rank, i] } }
        assert_equal splits.flatten(1), said[:single]
      end
    end

    define_method(:"test_reduce_to_each_root_on_#{size}") do
      ops = {sum: :sum, product: ->(all) { all.inject(:*) }, min: :min, max: :max}
      results = world(size) do |rank|
        (0...size).map do |root|
          ops.keys.map do |op|
            both_ways do |async_op|
              tensor = tensor([rank + 1, 3 - rank])
              returned = Distributed.reduce(tensor, dst: root, op: op, async_op: async_op)
              [[tensor], returned]
            end
          end
        end
      end
      columns = [(1..size).to_a, Array.new(size) { |rank| 3 - rank }]
      results.each_with_index do |said, rank|
        said.each_with_index do |by_op, root|
          ops.values.zip(by_op) do |op, values|
            wanted = (rank == root) ? columns.map { |column| op.to_proc.call(column) } : [rank + 1, 3 - rank]
            assert_equal [[wanted]] * 2, values, "rank #{rank}, root #{root}"
          end
        end
      end
    end
  end

  def exchange(dtype, rank, size)
    root = size - 1
    mine = tensor(piece(rank, 0), dtype)
    gathered = Array.new(size) { zeros(3, dtype) }
    Distributed.all_gather(gathered, mine)
    flat = zeros(3 * size, dtype)
    Distributed.all_gather_into_tensor(flat, mine)
    collected = Array.new(size) { zeros(3, dtype) } if rank == root
    Distributed.gather(mine, collected, dst: root)
    whole = zeros(3 * size, dtype) if rank == root
    Distributed.gather_into_tensor(whole, mine, dst: root)
    given = Array.new(size) { |to| tensor(piece(rank, to), dtype) }
    got = zeros(3, dtype)
    Distributed.scatter(got, (given if rank == root), src: root)
    swapped = Array.new(size) { zeros(3, dtype) }
    Distributed.all_to_all(swapped, given)
    single = zeros(3 * size, dtype)
    Distributed.all_to_all_single(single, Torch.cat(given))
    {all_gather: gathered, flat: [flat], gather: collected || [], whole: [whole].compact, scatter: [got], all_to_all: swapped,
     single: [single]}.transform_values { |tensors| tensors.map { |each| plain(each) } }
  end

  def expected_exchange(rank, size)
    root = size - 1
    all = Array.new(size) { |from| piece(from, 0) }
    mine = Array.new(size) { |from| piece(from, rank) }
    {all_gather: all, flat: [all.flatten], gather: (rank == root) ? all : [], whole: (rank == root) ? [all.flatten] : [],
     scatter: [piece(root, rank)], all_to_all: mine, single: [mine.flatten]}
  end

  # Rank r's piece is r or r + 1 elements long; some are empty.
  def uneven(rank, size)
    said = {}
    said[:all_gather] = both_ways do |async_op|
      outputs = Array.new(size) { |from| zeros(from + 1) }
      [outputs, Distributed.all_gather(outputs, tensor(piece(rank, 0, rank + 1)), async_op: async_op)]
    end
    said[:gather] = (0...size).map do |root|
      outputs = Array.new(size) { |from| zeros(from + 1) } if rank == root
      Distributed.gather(tensor(piece(rank, 0, rank + 1)), outputs, dst: root, async_op: true).wait
      (outputs || []).map { |output| plain(output) }
    end
    said[:scatter] = (0...size).map do |root|
      output = zeros(rank)
      Distributed.scatter(output, (Array.new(size) { |to| tensor(piece(rank, to, to)) } if rank == root), group_src: root)
      plain(output)
    end
    outputs = Array.new(size) { |from| zeros((from + rank) % 3) }
    Distributed.all_to_all(outputs, Array.new(size) { |to| tensor(piece(rank, to, (rank + to) % 3)) }, async_op: true).wait
    said[:all_to_all] = outputs.map { |output| plain(output) }
    said[:reduce_scatter] = both_ways do |async_op|
      output = zeros(rank + 1)
      inputs = Array.new(size) { |to| tensor(piece(rank, to, to + 1)) }
      [[output], Distributed.reduce_scatter(output, inputs, async_op: async_op)]
    end.flatten(1)
    said[:single] = split(rank, size)
    said
  end

  def split(rank, size)
    gives = Array.new(size) { |to| (rank + 2 * to) % 3 }
    gets = Array.new(size) { |from| (from + 2 * rank) % 3 }
    rows = (0...size).flat_map { |to| Array.new(gives[to]) { |i| [rank * 10 + to, i] } }
    input = rows.empty? ? Torch.zeros([0, 2]) : Torch.tensor(rows, dtype: :float32)
    output = Torch.zeros([gets.sum, 2])
    Distributed.all_to_all_single(output, input, output_split_sizes: gets, input_split_sizes: gives)
    again = Torch.zeros([gets.sum, 2])
    Distributed.all_to_all_single(again, input, gets, gives, async_op: true).wait
    raise "by position: #{again.to_a}" unless again.to_a == output.to_a

    output.to_a.map { |row| row.map(&:to_i) }
  end

  # A matrix that is turned, every second column, a number, one element, none.
  def test_shapes_that_are_not_plain
    results = world(2) do |rank|
      turned = Array.new(2) { Torch.zeros([3, 2]).t }
      Distributed.all_gather(turned, Torch.arange(6).to(:float32).reshape([2, 3]).add(rank * 10))
      columns = Torch.zeros([2, 2])
      Distributed.gather(Torch.tensor([[1.0, 9.0], [2.0, 9.0]]).add(rank).select(1, 0), ([columns.select(1, 0), columns.select(1, 1)] if rank == 1),
        dst: 1, async_op: true).wait
      numbers = Array.new(2) { Torch.tensor(0.0) }
      Distributed.all_gather(numbers, Torch.tensor(rank + 1.0))
      nothing = Array.new(2) { Torch.zeros([0, 4]) }
      Distributed.all_gather(nothing, Torch.zeros([0, 4]))
      swapped = Torch.zeros([2, 2])
      Distributed.all_to_all_single(swapped.t, Torch.tensor([[rank, 1.0], [2.0, 3.0]]).t)
      broad = Torch.zeros(2)
      Distributed.reduce_scatter_tensor(broad, Torch.tensor([rank + 1.0]).expand(4))
      trained = Torch.zeros(1, requires_grad: true)
      Distributed.scatter(trained, (rank.zero? ? [Torch.ones(1), Torch.ones(1) * 2] : nil))
      [turned.map(&:to_a), columns.to_a, numbers.map(&:item), nothing.map(&:shape), swapped.to_a, broad.to_a, trained.to_a]
    end
    matrix = [[0, 1, 2], [3, 4, 5]]
    results.each_with_index do |said, rank|
      assert_equal [matrix, matrix.map { |row| row.map { |n| n + 10 } }], said[0]
      assert_equal (rank == 1) ? [[1, 2], [2, 3]] : [[0, 0], [0, 0]], said[1]
      assert_equal [[1, 2], [[0, 4]] * 2], said[2..3]
      assert_equal rank.zero? ? [[0, 1], [2, 2]] : [[1, 1], [3, 3]], said[4]
      assert_equal [[3, 3], [rank + 1]], said[5..6]
    end
  end

  def test_groups_of_some_of_the_ranks
    results = world(3) do |rank|
      group = Distributed.new_group([0, 2])
      next if rank == 1

      mine = Torch.tensor([rank + 1.0])
      list = Array.new(2) { Torch.zeros(1) }
      Distributed.all_gather(list, mine, group: group)
      Distributed.broadcast(sent = mine.clone, src: 2, group: group)
      Distributed.broadcast(again = mine.clone, group_src: 0, group: group)
      Distributed.reduce(sum = mine.clone, dst: 2, group: group)
      collected = Array.new(2) { Torch.zeros(1) } if rank == 2
      Distributed.gather(mine, collected, group_dst: 1, group: group)
      Distributed.scatter(part = Torch.zeros(1), ([mine, mine * 2] if rank == 2), src: 2, group: group)
      [*list, sent, again, sum, *collected, part].map(&:item)
    end
    assert_equal [[1, 3, 3, 1, 1, 3], nil, [1, 3, 3, 1, 4, 1, 3, 6]], results
  end

  def test_several_lists_at_once
    results = world(2) do |rank|
      inputs = [tensor([rank, 1]), tensor([rank + 5], :int64)]
      outputs = Array.new(2) { [zeros(2), zeros(1, :int64)] }
      Distributed.all_gather_coalesced(outputs, inputs)
      later = Array.new(2) { [zeros(2), zeros(1, :int64)] }
      work = Distributed.all_gather_coalesced(later, inputs, async_op: true)
      work.wait
      [outputs, later, [work.result]].map { |lists| lists.map { |list| list.map { |each| plain(each) } } }
    end
    wanted = [[[0, 1], [5]], [[1, 1], [6]]]
    assert_equal [[wanted, wanted, [wanted.flatten(1)]]] * 2, results
  end
end
