# frozen_string_literal: true

require_relative "test_helper"

class PointToPointTest < Minitest::Test
  DTYPES = %i[uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 bool].freeze

  (2..4).each do |size|
    define_method(:"test_a_ring_of_#{size}") do
      results = world(size) do |rank|
        right = (rank + 1) % size
        left = (rank - 1) % size
        DTYPES.map do |dtype|
          got = Torch.zeros([3]).to(dtype)
          sent = Distributed.isend(Torch.tensor([rank, 1, 0]).to(dtype), dst: right, tag: 7)
          source = Distributed.recv(got, src: left, tag: 7)
          sent.wait
          [source, got.to(dtype.start_with?("complex") ? dtype : :float64).to_a.map { |number| number.is_a?(Complex) ? number.real : number }]
        end
      end
      results.each_with_index do |said, rank|
        left = (rank - 1) % size
        said.zip(DTYPES) do |value, dtype|
          assert_equal [left, [(dtype == :bool) ? left.clamp(0, 1) : left, 1, 0]], value, dtype
        end
      end
    end
  end

  def test_from_anybody_in_the_order_of_each
    results = world(3) do |rank|
      if rank.zero?
        got = Array.new(4) do
          tensor = Torch.zeros(1)
          [Distributed.recv(tensor), tensor.item]
        end
        late = Distributed.irecv(tensor = Torch.zeros(2))
        before = [late.completed?, late.source_rank]
        Distributed.barrier
        late.wait
        [got.group_by(&:first).transform_values { |pairs| pairs.map(&:last) }, before, late.source_rank, late.operation, late.result.map(&:to_a),
          tensor.to_a]
      else
        2.times { |i| Distributed.send(Torch.tensor([10.0 * rank + i]), dst: 0) }
        Distributed.barrier
        Distributed.send(Torch.tensor([5.0, 6.0]), dst: 0) if rank == 2
      end
    end
    assert_equal [{1 => [10.0, 11.0], 2 => [20.0, 21.0]}, [false, nil], 2, :recv, [[5.0, 6.0]], [5.0, 6.0]],
      [results[0][0].sort.to_h, *results[0][1..]]
    assert_nil results[1]
  end

  def test_tags_match_and_works_end_in_any_order
    results = world(2) do |rank|
      if rank.zero?
        [3, 1, 2].map { |tag| Distributed.isend(Torch.full([4], tag, dtype: :int64), dst: 1, tag: tag) }.each(&:wait)
        []
      else
        tensors = Array.new(3) { Torch.zeros([4], dtype: :int64) }
        works = tensors.each_with_index.map { |tensor, i| Distributed.irecv(tensor, src: 0, tag: i + 1) }
        works.rotate(1).each { |work| work.wait(20) }
        tensors.map { |tensor| tensor.to_a.uniq } + works.map(&:success?)
      end
    end
    assert_equal [[], [[1], [2], [3], true, true, true]], results
  end

  def test_a_batch_both_ways
    results = world(3) do |rank|
      right = (rank + 1) % 3
      left = (rank - 1) % 3
      got = Torch.zeros([2, 2])
      works = Distributed.batch_isend_irecv([
        Distributed::P2POp.new(:isend, Torch.full([2], rank + 1.0), right),
        Distributed::P2POp.new(Distributed.method(:irecv), got.select(1, 0), peer: left),
        Distributed::P2POp.new("isend", Torch.full([2], rank + 10.0), group_peer: left, tag: 3),
        Distributed::P2POp.new(:irecv, got.select(1, 1), group_peer: right, tag: 3)
      ])
      works.each(&:wait)
      [works.size, got.to_a]
    end
    results.each_with_index do |said, rank|
      row = [(rank - 1) % 3 + 1.0, (rank + 1) % 3 + 10.0]
      assert_equal [4, [row, row]], said
    end
  end

  # Global rank 2 is rank 1 of the group.
  def test_in_a_group_of_some_ranks
    results = world(3) do |rank|
      group = Distributed.new_group([0, 2])
      tensor = Torch.tensor([rank + 1.0])
      case rank
      when 0
        Distributed.send(tensor, dst: 2, group: group)
        Distributed.send(tensor * 2, group_dst: 1, group: group)
        work = Distributed.irecv(tensor, group: group)
        work.wait
        [work.source_rank, tensor.item]
      when 2
        first = [Distributed.recv(tensor, src: 0, group: group), tensor.item]
        second = [Distributed.recv(tensor, group: group), tensor.item]
        Distributed.send(tensor * 5, group_dst: 0, group: group)
        [first, second]
      end
    end
    assert_equal [[2, 10.0], nil, [[0, 1.0], [0, 2.0]]], results
  end

  def test_messages_that_do_not_fit_are_told
    said = world(2) do |rank|
      next failure { Distributed.send(Torch.ones(3), dst: 1) && Distributed.barrier } if rank.zero?

      failure { Distributed.recv(Torch.ones(4), src: 0) }
    end
    assert_equal "Torch::Distributed::MismatchError", said[1][0]
    assert_match(/3/, said[1][1])
    assert_match(/4/, said[1][1])
  end

  def test_send_is_rubys_own_for_names
    assert_equal :off, Distributed.send(:get_debug_level)
    assert_equal Distributed::ReduceOp, Distributed.send(:const_get, "ReduceOp")
  end

  def test_wrong_arguments_are_named
    alone do
      one = Torch.ones(3)
      message = Distributed::P2POp.new(:isend, one, 0)
      {
        /dst: expected a rank from 0 to 0, got nil/ => -> { Distributed.isend(one) },
        /dst: expected a rank from 0 to 0, got 1/ => -> { Distributed.send(one, dst: 1) },
        /src: 0 and group_src: 0 are both given/ => -> { Distributed.recv(one, src: 0, group_src: 0) },
        /tag: expected an Integer from 0 to 4294967295, got -1/ => -> { Distributed.irecv(one, tag: -1) },
        /tensor: expected a Torch::Tensor, got 5 \(Integer\)/ => -> { Distributed.isend(5, dst: 0) },
        /tensor: .*sparse/ => -> { Distributed.irecv(Torch.eye(2).to_sparse, src: 0) },
        /tensor: .*share their memory.*strides \[0\]/ => -> { Distributed.irecv(Torch.ones(1).expand(3)) },
        /oneself|itself|own rank|to rank 0/ => -> { Distributed.isend(one, dst: 0) },
        /op: expected :isend or :irecv, got :send/ => -> { Distributed::P2POp.new(:send, one, 0) },
        /tensor: expected a Torch::Tensor, got nil/ => -> { Distributed::P2POp.new(:isend, nil, 0) },
        /p2p_op_list: expected .* got \[\]/ => -> { Distributed.batch_isend_irecv([]) },
        /p2p_op_list\[1\]\.tensor: .*sparse/ =>
          -> { Distributed.batch_isend_irecv([message, Distributed::P2POp.new(:irecv, Torch.eye(2).to_sparse, 0)]) },
        /peer: expected a rank from 0 to 0, got nil/ => -> { Distributed.batch_isend_irecv([Distributed::P2POp.new(:isend, one)]) }
      }.each do |text, call|
        assert_match text, failure(&call)&.last.to_s
      end
    end
  end
end
