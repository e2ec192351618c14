# frozen_string_literal: true

require_relative "test_helper"

class CoalescingTest < Minitest::Test
  (1..4).each do |size|
    define_method(:"test_all_reduces_together_on_#{size}") do
      results = world(size) do |rank|
        tensors = [[3], [0], [], [2, 2]].map { |shape| Torch.full(shape, rank + 1.0) }
        turned = Torch.arange(6).to(:float32).reshape([2, 3]).t
        [false, true].map do |async_op|
          each = [*tensors.map(&:clone), turned.clone.t]
          work = Distributed.all_reduce_coalesced(each, op: :max, async_op: async_op)
          result = work.result if work&.wait
          [each.map(&:to_a), result.nil? || result.zip(each).all? { |one, other| one.equal?(other) }]
        end
      end
      wanted = [[size] * 3, [], [size], [[size, size]] * 2, [[0, 1, 2], [3, 4, 5]]]
      results.each { |said| assert_equal [[wanted, true]] * 2, said }
    end
  end

  # As without the block: one after the other where they are not the same operation on other memory.
  def test_views_of_one_memory_keep_the_order_of_the_calls
    results = world(2) do |rank|
      sum, most, parts = Torch.ones(1), Torch.full([1], rank.to_f), Torch.ones(4)
      square = Torch.ones(2, 2)
      Distributed.coalescing_manager do
        Distributed.all_reduce(sum)
        Distributed.all_reduce(most, op: :max)
        Distributed.all_reduce(most.view(1))
        Distributed.all_reduce(parts)
        Distributed.all_reduce(parts[0..1])
        Distributed.all_reduce(square.t)
        Distributed.all_reduce(square)
      end
      [sum, most, parts, square].map(&:to_a)
    end
    assert_equal [[[2], [2], [4, 4, 2, 2], [[4, 4], [4, 4]]]] * 2, results
  end

  def test_a_block_is_one_work
    results = world(2) do |rank|
      a, b, c = Array.new(3) { |i| Torch.full([2], rank + i + 1.0) }
      d = Torch.tensor([rank + 1])
      list = Array.new(2) { Torch.zeros(2) }
      inside = nil
      work = Distributed.coalescing_manager(async_ops: true) do
        inside = [Distributed.all_reduce(a), Distributed.all_reduce(b, async_op: true), Distributed.all_reduce(d, op: :max)]
        Distributed.all_reduce(a)
        Distributed.all_gather(list, a)
        Distributed.broadcast(c, src: 1)
        Distributed.barrier
      end
      kinds = work.works.map(&:operation)
      before = [work.class.name, work.is_a?(Distributed::Work), work.operation, work.source_rank]
      work.wait(timeout: 20)
      after = [work.completed?, work.success?, work.exception, work.sequence == work.works.first.sequence, work.result.size, work.inspect]
      [inside, kinds, before, after, [a, b, c, d, *list].map(&:to_a)]
    end
    results.each do |inside, kinds, before, after, values|
      assert_equal [nil, nil, nil], inside
      assert_equal %i[all_reduce all_reduce all_reduce all_gather broadcast barrier], kinds
      assert_equal ["Torch::Distributed::CombinedWork", true, :coalesced, nil], before
      assert_equal [true, true, nil, true, 7, "#<Torch::Distributed::CombinedWork of 6, done>"], after
      assert_equal [[6, 6], [5, 5], [4, 4], [2], [6, 6], [6, 6]], values
    end
  end

  def test_blocks_wait_by_default_and_stand_for_themselves
    results = world(2) do |rank|
      group = Distributed.new_group([0, 1])
      one = Torch.tensor([rank + 1.0])
      other = one.clone
      direct = nil
      returned = Distributed.coalescing_manager do
        Distributed.all_reduce(one)
        direct = Distributed.all_reduce(other, group: group).item
        Thread.new { Distributed.get_rank }.join
      end
      empty = Distributed.coalescing_manager(async_ops: true) {}
      broken = failure { Distributed.coalescing_manager { raise IOError, "enough" } }
      [returned, one.item, direct, empty.wait, empty.completed?, empty.works, broken, Distributed.all_reduce(Torch.ones(1)).item]
    end
    assert_equal [[nil, 3.0, 3.0, true, true, [], %w[IOError enough], 2.0]] * 2, results
  end

  def test_messages_in_a_block
    results = world(2) do |rank|
      got = [Torch.zeros(1), Torch.zeros(1)]
      Distributed.coalescing_manager do
        Distributed.isend(Torch.tensor([rank + 1.0]), dst: 1 - rank)
        Distributed.irecv(got[0], src: 1 - rank)
        Distributed.send(Torch.tensor([rank + 5.0]), dst: 1 - rank)
        Distributed.recv(got[1])
      end
      got.map(&:item)
    end
    assert_equal [[2.0, 6.0], [1.0, 5.0]], results
  end

  def test_wrong_arguments_are_named
    alone do
      one = Torch.ones(2)
      {
        /coalescing_manager: expected a block/ => -> { Distributed.coalescing_manager },
        /coalescing_manager: expected to be called outside of its own block/ =>
          -> { Distributed.coalescing_manager { Distributed.coalescing_manager {} } },
        /tensor: expected a Torch::Tensor, got 3/ => -> { Distributed.coalescing_manager { Distributed.all_reduce(3) } },
        /tensor: .*sparse/ => -> { Distributed.coalescing_manager { Distributed.all_reduce(Torch.eye(2).to_sparse) } },
        /tensors: expected an Array of tensors, got an empty one/ => -> { Distributed.all_reduce_coalesced([]) },
        /tensors: expected an Array of tensors, got tensor/ => -> { Distributed.all_reduce_coalesced(one) },
        /tensors\[1\]: expected a Torch::Tensor, got nil/ => -> { Distributed.all_reduce_coalesced([one, nil]) },
        /tensors\[1\]: expected float32, as tensors\[0\] is, got int64/ => -> { Distributed.all_reduce_coalesced([one, one.to(:int64)]) }
      }.each do |text, call|
        assert_match text, failure(&call)&.last.to_s
      end
      assert_equal 1.0, Distributed.all_reduce(one).max.item
    end
  end
end
