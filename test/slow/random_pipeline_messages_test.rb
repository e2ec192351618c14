# frozen_string_literal: true

require "minitest/autorun"
require_relative "../ruby/simulated_devices"

# Random schedules, ranks, stages, micro-batches and shapes on devices that run one kernel at a time.
# TDDP_RANDOM_SEED repeats a run, TDDP_RANDOM_CASES sets how many there are.
class RandomPipelineMessagesTest < Minitest::Test
  Orders = Torch::Distributed::Pipelining::Orders

  SEED = Integer(ENV.fetch("TDDP_RANDOM_SEED", "1000"))
  CASES = Integer(ENV.fetch("TDDP_RANDOM_CASES", "150"))

  def plan(random, ranks, stages, micro_batches)
    case random.rand(3)
    when 0 then Orders.fill_drain(ranks, stages, micro_batches)
    when 1 then Orders.one_forward_one_backward(ranks, stages, micro_batches, ahead: random.rand(1..2))
    else Orders.one_forward_one_backward(ranks, stages, micro_batches, split: true)
    end
  rescue ArgumentError # micro-batches that it can't divide
    Orders.fill_drain(ranks, stages, micro_batches)
  end

  def test_no_device_waits_for_ever
    CASES.times do |i|
      random = Random.new(SEED + i)
      ranks, micro_batches = random.rand(1..4), random.rand(1..9)
      stages = ranks * random.rand(1..3)
      training = plan(random, ranks, stages, micro_batches)
      steps = Array.new(4) { (random.rand < 0.7) ? training : Orders.forward_only(ranks, stages, micro_batches) }
      # Changes for some micro-batches of some stages, and back.
      changes = Hash.new { |hash, key| hash[key] = (random.rand < 0.3) ? random.rand(4) : 2 }
      SimulatedDevices.new(ranks).run(steps) { |step, stage, micro_batch| [1, changes[[step, stage, micro_batch]]] }
    rescue SimulatedDevices::Error => e
      flunk "seed #{SEED + i}: #{e.message}"
    else
      assert true
    end
  end
end
