# frozen_string_literal: true

require "minitest/autorun"
require_relative "simulated_devices"

# The messages of a step begin in one order on all ranks: devices that run one kernel at a time never wait for each other.
class PipelineMessagesTest < Minitest::Test
  Orders = Torch::Distributed::Pipelining::Orders

  PLANS = {
    gpipe: ->(p, m) { Orders.fill_drain(p, p, m) },
    gpipe_of_two_stages: ->(p, m) { Orders.fill_drain(p, 2 * p, m) },
    one_forward_one_backward: ->(p, m) { Orders.one_forward_one_backward(p, p, m) },
    interleaved: ->(p, m) { Orders.one_forward_one_backward(p, 2 * p, m, ahead: 2) },
    zero_bubble: ->(p, m) { Orders.one_forward_one_backward(p, p, m, split: true) },
    interleaved_zero_bubble: ->(p, m) { Orders.one_forward_one_backward(p, 2 * p, m, split: true) }
  }.freeze

  # Receives that are begun ahead take memory: as many as there are micro-batches, if those have been through one stage before the
  # next one begins with them.
  AHEAD = {gpipe: 1, gpipe_of_two_stages: 3, one_forward_one_backward: 1, interleaved: 3, zero_bubble: 2, interleaved_zero_bubble: 4}.freeze

  PLANS.each do |name, plan|
    # Unknown shapes, then known ones, then others, then no backward.
    define_method(:"test_#{name}") do
      [[1, 2], [2, 4], [3, 3], [4, 6]].each do |ranks, micro_batches|
        training = plan.call(ranks, micro_batches)
        stages = training.flatten.map(&:stage).max + 1
        forward = Orders.forward_only(ranks, stages, micro_batches)
        devices = SimulatedDevices.new(ranks)
        devices.run([training, training, training, forward]) { |step, stage, i| [2, (step < 2 || stage.zero?) ? 3 : 4 + i % 2] }
        assert_operator devices.ahead, :<=, AHEAD.fetch(name)
      end
    end
  end
end
