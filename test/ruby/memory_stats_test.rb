# frozen_string_literal: true

require_relative "test_helper"

class MemoryStatsTest < Minitest::Test
  # The block in a process whose tensors are counted, and that collects no garbage on its own.
  def counted
    Distributed.fork_world(1) do
      GC.start
      GC.disable
      Distributed.track_memory
      yield
    end.first
  end

  # What the block adds: bytes now, bytes at most, allocations.
  def grown
    Distributed.reset_peak_memory_stats
    before = Distributed.memory_stats
    yield
    Distributed.memory_stats.map { |name, value| value - before[name] }
  end

  def drop(tensors)
    tensors.clear
    # Where the last one's address may still be on the stack.
    tensors << Torch.empty(0)
    3.times { GC.start }
  end

  def test_tensors_count_with_all_their_bytes
    sizes = [[1000, :float32], [3, 5, :float64], [7, :uint8], [11, :int64], [0, :float32]]
    found = counted do
      kept = []
      sizes.map { |*shape, dtype| grown { kept << Torch.empty(*shape, dtype: dtype) } }
    end
    assert_equal [[4000, 4000, 1], [120, 120, 1], [7, 7, 1], [88, 88, 1], [0, 0, 0]], found
  end

  def test_a_view_counts_nothing
    found = counted do
      base = Torch.empty(100, 10)
      views = []
      [grown { views << base.t << base.view(1000) << base.narrow(0, 2, 5) << base.detach }, grown { views << base.t.contiguous }]
    end
    assert_equal [[0, 0, 0], [4000, 4000, 1]], found
  end

  def test_the_peak_stays_when_tensors_are_freed
    found = counted do
      kept = Array.new(100) { Torch.empty(1000) }
      [grown { drop(kept) }, grown { kept << Torch.empty(10) }]
    end
    now, peak, made = found[0]
    assert_includes (-400_000..-392_000), now # the stack may show the collector one or two that are gone
    assert_equal [0, 0], [peak, made]
    assert_equal [40, 40, 1], found[1]
  end

  def test_a_reset_takes_what_there_is_now
    peaks = counted do
      kept = Array.new(10) { Torch.empty(100_000) }
      before = Distributed.memory_stats
      drop(kept)
      after = Distributed.memory_stats
      Distributed.reset_peak_memory_stats
      reset = Distributed.memory_stats
      [before[:peak_bytes] - before[:current_bytes], after[:peak_bytes] == before[:peak_bytes], reset[:peak_bytes] == reset[:current_bytes],
        after[:peak_bytes] - reset[:peak_bytes] >= 3_000_000]
    end
    assert_equal [0, true, true, true], peaks
  end

  # They are freed as they were allocated, so the counts stay right.
  def test_tensors_from_before_are_not_counted
    found = Distributed.fork_world(1) do
      old = Array.new(50) { Torch.ones(1000) }
      first = Distributed.memory_stats
      grown = old.map { |tensor| tensor.resize!(2000) }
      resized = Distributed.memory_stats
      sum = grown.sum { |tensor| tensor.narrow(0, 0, 1000).sum.item }
      old.clear
      grown.clear
      GC.start
      [first.values_at(:current_bytes, :peak_bytes), resized[:current_bytes], sum, Distributed.memory_stats[:current_bytes] < 100]
    end.first
    assert_equal [[0, 0], 0, 50_000.0, true], found
  end

  def test_an_operation_s_result_and_the_gradients
    found = counted do
      layer = Torch::NN::Linear.new(30, 20)
      x = Torch.ones(10, 30)
      output = nil
      [grown { output = layer.call(x) }.first, grown { output.sum.backward }.first, layer.parameters.sum { |each| each.grad.numel }]
    end
    assert_equal 10 * 20 * 4, found[0]
    assert_equal 620, found[2]
    assert_includes 620 * 4..620 * 4 + 100, found[1] # with the sum itself, and its gradient
  end

  def test_the_memory_of_groups_counts
    found = world(2) do
      GC.disable
      Distributed.track_memory
      shared = []
      model = Torch::NN::Linear.new(16, 16)
      [grown { shared << Distributed.empty_shared(250, 4) }, grown { shared << Torch::NN::Parallel::DistributedDataParallel.new(model) }.first,
        grown { drop(shared) }.first]
    end
    found.each do |tensor, buckets, dropped|
      assert_equal [4000, 4000, 1], tensor
      assert_includes 272 * 4..272 * 4 + 128, buckets
      assert_includes (-4000 - buckets..-4000), dropped
    end
  end

  def test_the_values_are_right_and_aligned
    sums, offsets = counted do
      tensors = Array.new(200) { |i| Torch.full([i + 1], i) }
      [tensors.each_with_index.sum { |tensor, i| tensor.sum.item - i * (i + 1) }, tensors.map { |tensor| tensor._data_ptr % 64 }.uniq]
    end
    assert_equal [0, [0]], [sums, offsets]
  end

  def test_threads_count_together
    found = counted do
      before = Distributed.memory_stats
      threads = Array.new(4) { Thread.new { Array.new(500) { Torch.empty(25) } } }
      kept = threads.map(&:value)
      after = Distributed.memory_stats
      [after[:current_bytes] - before[:current_bytes], after[:allocations] - before[:allocations], kept.flatten.size]
    end
    assert_equal [200_000, 2000, 2000], found
  end

  def test_a_failed_allocation_counts_nothing
    found = counted do
      [grown { failure { Torch.empty(2**58) } }, failure { Torch.empty(2**58) }.last]
    end
    assert_equal [0, 0, 0], found[0]
    assert_match(/memory|alloc/i, found[1])
  end

  def test_devices
    stats = counted { ["cpu", :cpu, Torch.device("cpu")].map { |device| Distributed.memory_stats(device).keys } }
    assert_equal [%i[current_bytes peak_bytes allocations]] * 3, stats
    [3.5, "tpu", "cuda:x", -1].each do |device|
      text = assert_raises(ArgumentError) { Distributed.memory_stats(device) }.message
      assert_equal "device: expected \"cpu\", \"cuda\", \"cuda:0\" or a GPU's number, got #{device.inspect}", text
    end
    return if Torch::CUDA.available?

    ["cuda", "cuda:1", 1].each do |device|
      assert_raises(Distributed::UnsupportedError) { Distributed.memory_stats(device) }
      assert_raises(Distributed::UnsupportedError) { Distributed.reset_peak_memory_stats(device) }
    end
  end
end
