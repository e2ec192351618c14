# frozen_string_literal: true

require "minitest/autorun"
require "torch/distributed/pipelining/orders"
require "torch/distributed/pipelining/timeline"
require "torch/distributed/pipelining/link"
require "torch/distributed/pipelining/message_order"

# The orders of the schedules as tables, without tensors: as PyTorch executes them, and as long as theory has it.
class PipelineOrdersTest < Minitest::Test
  Orders = Torch::Distributed::Pipelining::Orders
  Timeline = Torch::Distributed::Pipelining::Timeline
  Action = Torch::Distributed::Pipelining::Action

  # All parts of a backward together take two forwards.
  COST = {F: 1, B: 2, I: 1, W: 1}.freeze

  def length(plan)
    Timeline.of(plan) { |action| COST.fetch(action.kind) }.length
  end

  def short(plan)
    plan.map { |list| list.map { |action| "#{action.kind}#{action.micro_batch}" }.join(" ") }
  end

  def test_gpipe
    assert_equal ["F0 F1 F2 B0 B1 B2"] * 2, short(Orders.fill_drain(2, 2, 3))
    assert_equal ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"],
      Orders.fill_drain(2, 4, 2).map { |list| list.join(" ") }
  end

  def test_one_forward_one_backward
    assert_equal ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"], short(Orders.one_forward_one_backward(2, 2, 4))
    assert_equal ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
      short(Orders.one_forward_one_backward(3, 3, 4))
    assert_equal [
      "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5", "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
      "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5", "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"
    ], short(Orders.one_forward_one_backward(4, 4, 6))
  end

  def test_fewer_micro_batches_than_ranks
    assert_equal ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"], short(Orders.one_forward_one_backward(3, 3, 2))
  end

  def test_interleaved
    assert_equal [
      "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
      "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    ], Orders.one_forward_one_backward(2, 4, 4, ahead: 2).map { |list| list.join(" ") }
  end

  def test_backward_in_two_parts
    assert_equal [
      "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3", "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3", "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"
    ], short(Orders.one_forward_one_backward(3, 3, 4, split: true))
  end

  def test_bubbles_are_those_of_the_literature
    [[2, 2], [2, 8], [3, 5], [4, 4], [4, 8], [4, 16]].each do |p, m|
      ideal = 3 * m
      [Orders.fill_drain(p, p, m), Orders.one_forward_one_backward(p, p, m)].each { |plan| assert_equal ideal + 3 * (p - 1), length(plan) }
      # ZB-H1: (p - 1)(TF + TI + TW - 2 TW), all of these being 1.
      assert_equal ideal + (p - 1), length(Orders.one_forward_one_backward(p, p, m, split: true)) if m >= 2 * p - 1
      next unless (m % p).zero?

      [2, 3].each { |v| assert_equal v * ideal + 3 * (p - 1), length(Orders.one_forward_one_backward(p, v * p, m, ahead: 2)) }
    end
    assert_in_delta 3.0 / 11, Timeline.of(Orders.one_forward_one_backward(4, 4, 8)) { |action| COST.fetch(action.kind) }.bubble, 1e-12
  end

  # A stage has at most as many micro-batches between forward and backward as there are stages from it to the last.
  def test_micro_batches_in_flight
    in_flight = lambda do |list|
      now = 0
      list.map { |action| now += {F: 1, B: -1, I: -1, W: 0}.fetch(action.kind) }.max
    end
    [4, 8, 32].each do |m|
      [false, true].each do |split|
        assert_equal [4, 3, 2, 1], Orders.one_forward_one_backward(4, 4, m, split: split).map(&in_flight)
      end
      assert_equal [m] * 4, Orders.fill_drain(4, 4, m).map(&in_flight)
    end
  end

  def test_each_action_occurs_once_and_none_waits_forever
    [1, 2, 3, 4, 5].product([1, 2, 3], [1, 2, 3, 4, 6, 8, 12], [[1, false], [2, false], [1, true]]) do |p, v, m, (ahead, split)|
      plan = begin
        Orders.one_forward_one_backward(p, p * v, m, ahead: ahead, split: split)
      rescue ArgumentError
        refute_equal 0, m % [1, m / p].max
        next
      end
      kinds = split ? %i[F I W] : %i[F B]
      expected = (0...p * v).to_a.product(kinds, (0...m).to_a).map { |each| Action.new(*each) }
      assert_equal expected.sort_by(&:to_s), plan.flatten.sort_by(&:to_s)
      assert_operator length(plan), :>=, 3 * m * v
      assert_equal expected.size, Timeline.merge(plan).size
    end
  end

  # A message follows the action that produces it; with ranks from and to.
  def test_order_of_messages
    link = Torch::Distributed::Pipelining::Link
    names = {link::FORWARD => "F", link::LATE => "late", link::BACKWARD => "B"}
    order = Torch::Distributed::Pipelining::MessageOrder
    text = lambda do |each|
      each.is_a?(Action) ? each.to_s : "#{each.from}>#{each.to}:#{names.fetch(each.kind)}#{each.micro_batch}"
    end
    plan = Orders.one_forward_one_backward(2, 2, 3)
    assert_equal "0F0 0>1:F0 0>1:late0 0F1 0>1:F1 1F0 1B0 1>0:B0 0>1:late1 1F1 0B0 1B1 1>0:B1 0F2 0>1:F2 0>1:late2 1F2 0B1 1B2 1>0:B2 0B2",
      order.of(plan).map(&text).join(" ")
    assert_equal "0>1:F0 0>1:late0 0>1:F1 1F0 1B0 1>0:B0 0>1:late1 1F1 1B1 1>0:B1 0>1:F2 0>1:late2 1F2 1B2 1>0:B2",
      order.for_rank(plan, 1).map(&text).join(" ")
    assert_equal 2 * 3 * 3, order.of(Orders.fill_drain(1, 3, 3)).size
  end

  def test_rounds_that_do_not_divide_the_micro_batches
    error = assert_raises(ArgumentError) { Orders.one_forward_one_backward(2, 4, 5, ahead: 2) }
    assert_equal "n_microbatches: expected a multiple of 2, since 2 ranks with several stages take them in 2 rounds, got 5", error.message
  end

  def test_a_plan_that_waits_for_itself
    plan = [%w[0F0 0B0], %w[1B0 1F0]].map { |list| list.map { |text| Action.parse(text) } }
    error = assert_raises(ArgumentError) { Timeline.of(plan) { 1 } }
    assert_equal "plan: 0B0, 1B0 wait for each other", error.message
    assert_raises(ArgumentError) { Action.parse("F0") }
  end
end
