# frozen_string_literal: true

require_relative "test_helper"
require "tmpdir"

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

  # Rank 0 waits for an operation that rank 1 joins only afterwards; what it says, and after how many seconds.
  def interrupted(others)
    Dir.mktmpdir do |folder|
      shared_world(2) do |rank|
        store = Distributed::FileStore.new(File.join(folder, "store"))
        tensor = Torch.ones(3)
        Distributed.barrier
        said = nil
        if rank == 1
          store.get("interrupted")
          Distributed.all_reduce(tensor)
        else
          beside = Array.new(others) { Thread.new { sleep } }
          sent = nil
          Thread.new do
            sleep 0.4
            sent = Process.clock_gettime(Process::CLOCK_MONOTONIC)
            Process.kill(:INT, Process.pid)
          end
          begin
            Distributed.all_reduce(tensor)
          rescue Interrupt
            said = Process.clock_gettime(Process::CLOCK_MONOTONIC) - sent
          end
          beside.each(&:kill)
          store.set("interrupted", "")
        end
        Distributed.barrier
        [said, tensor.to_a]
      end
    end
  end

  def test_ctrl_c_ends_a_wait_soon_and_the_operation_goes_on
    [0, 2].each do |others|
      (elapsed, first), (_, second) = interrupted(others)
      assert_operator elapsed, :<, 1
      assert_equal [2.0] * 3, first
      assert_equal [2.0] * 3, second
    end
  end
end
