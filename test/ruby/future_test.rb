# frozen_string_literal: true

require_relative "test_helper"

class FutureTest < Minitest::Test
  Future = Torch::Distributed::Future

  def test_of_an_operation
    results = world(2) do |rank|
      tensor = Torch.tensor([rank + 1.0])
      future = Distributed.all_reduce(tensor, async_op: true).get_future
      halved = future.then { |done| done.value.first / 2 }
      [halved.wait.to_a, halved.value.to_a, halved.done?, future.done?, tensor.to_a]
    end
    assert_equal [[[1.5], [1.5], true, true, [3.0]]] * 2, results
  end

  # As hooks that average in several stages do.
  def test_a_block_may_start_another_operation
    results = world(2) do |rank|
      Distributed.all_reduce(Torch.tensor([rank + 1.0]), async_op: true).get_future
        .then { |done| Distributed.all_reduce(done.value.first * (rank + 1), async_op: true) }
        .then { |done| done.value.first.to_a }.wait
    end
    assert_equal [[9.0]] * 2, results
  end

  def test_blocks_run_once_and_not_before_somebody_waits
    calls = 0
    future = Future.of(3).then { |done| (calls += 1) && done.value + 1 }
    assert_equal [0, false], [calls, future.done?]
    assert_equal [4, 4, 4], [future.wait, future.value, future.wait]
    assert_equal 1, calls
    assert_equal 5, future.then { |done| Future.of(done.value + 1) }.wait
  end

  def test_errors_come_with_each_wait
    calls = 0
    future = Future.of(nil).then { (calls += 1) && raise(IOError, "lost") }
    2.times { assert_raises(IOError) { future.wait } }
    assert_equal 1, calls
    assert_match(/then: expected a block/, assert_raises(ArgumentError) { future.then }.message)
  end
end
