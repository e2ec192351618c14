# frozen_string_literal: true

require_relative "test_helper"
require "fiddle"

# Waiting for operations that shared memory carries: the thread that waits does this rank's part, for moments with the
# GVL in its hand, else without.
class SharedWaitsTest < Minitest::Test
  def shared_world(size, &block)
    with_env("TDDP_SHM" => "1") { world(size, &block) }
  end

  def test_results_are_right_whichever_thread_brings_them_about
    results = shared_world(2) do |rank|
      ticks = 0
      ticker = Thread.new { loop { ticks += 1 and sleep 0.001 } }
      wrong = (1..300).count do |round|
        tensors = Array.new(3) { |each| Torch.full([[1, 40, 70_000][each]], rank + round, dtype: :float32) }
        works = tensors.first(2).map { |tensor| Distributed.all_reduce(tensor, async_op: true) }
        sleep 0.002 if round % 50 == rank
        Distributed.all_reduce(tensors[2]) if round % 10 == 0
        Distributed.barrier
        works.reverse_each(&:wait)
        sum = 2 * round + 1
        tensors[0].item != sum || tensors[1][39].item != sum || (round % 10 == 0 && tensors[2][69_999].item != sum)
      end
      ticker.kill
      [wrong, ticks.positive?]
    end
    assert_equal [[0, true]] * 2, results
  end

  # Rank 1 joins the operation only after rank 0's wait has ended.
  def test_ctrl_c_ends_a_wait_and_the_operation_goes_on
    ended = [0, 2].to_h { |others| [others, Event.new] }
    results = shared_world(2) do |rank|
      ended.map do |others, event|
        tensor = Torch.ones(3)
        Distributed.barrier
        if rank == 1
          event.wait
          Distributed.all_reduce(tensor)
        else
          beside = Array.new(others) { Thread.new { sleep } }
          when_waiting { Process.kill(:INT, Process.pid) }
          assert_raises(Interrupt) { Distributed.all_reduce(tensor) }
          beside.each(&:kill)
          event.set
        end
        Distributed.barrier
        tensor.to_a
      end
    end
    assert_equal [[[2.0] * 3] * 2] * 2, results
  end

  # Has a signal arrive in the midst of what the block computes, before it waits for anything: after so much of the
  # processor's time, which the kernel counts roughly.
  #
  # @return [Boolean] whether the signal came before the block's end
  def interrupt_after(processor_seconds)
    set = Fiddle::Function.new(Fiddle::Handle::DEFAULT["setitimer"], [Fiddle::TYPE_INT, Fiddle::TYPE_VOIDP, Fiddle::TYPE_VOIDP], Fiddle::TYPE_INT)
    in_time = ->(seconds) { set.call(2, [0, 0, 0, (seconds * 1_000_000).round].pack("q4"), nil) } # SIGPROF
    came = false
    trap("PROF") do
      came = true
      raise IOError, "enough"
    end
    begin
      in_time.call(processor_seconds)
      yield
      in_time.call(0)
      return false unless came
    rescue Distributed::CanceledError
      nil # Backward has an error of its own, unless the other rank was there already; the signal's comes with it or after it.
    end
    sleep
  rescue IOError
    true
  end

  def processor_time
    before = Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID)
    yield
    Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID) - before
  end

  # The other rank gets this one's part, though this one neither waits nor does anything else until then.
  def test_an_interrupt_before_the_wait_of_backward_ends_the_wait_alone
    averaged = Array.new(20) { Event.new }
    results = shared_world(2) do |rank|
      net = Torch::NN::Linear.new(1000, 1000, bias: false)
      model = Torch::NN::Parallel::DistributedDataParallel.new(net)
      inputs = Torch.full([1000, 1000], rank + 1.0)
      backward = lambda do
        loss = model.call(inputs).sum
        net.zero_grad
        -> { loss.backward }
      end
      3.times { backward.call.call }
      took = processor_time { model.no_sync { model.call(inputs).sum.backward } }
      interrupted = averaged.any? do |event|
        if rank.zero?
          ended = interrupt_after(took / 6, &backward.call)
          event.wait
        else
          backward.call.call
          event.set
        end
        Distributed.broadcast_object_list(said = [ended], src: 0)
        said[0]
      end
      backward.call.call
      [interrupted, net.weight.grad.min.item, net.weight.grad.max.item]
    end
    assert_equal [[true, 1500.0, 1500.0]] * 2, results
  end
end
