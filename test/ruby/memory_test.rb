# frozen_string_literal: true

require_relative "test_helper"

# The collector may come at any time, move what it likes, and free a handle whose operation still runs.
class MemoryTest < Minitest::Test
  # On one rank: two would fight over the cores.
  def stressed(rank = 0)
    GC.stress = rank.zero?
    yield
  ensure
    GC.stress = false
  end

  def test_stores_under_stress
    store = Distributed::PrefixStore.new("view", Distributed::HashStore.new)
    tcp = Distributed::TCPStore.new("127.0.0.1", 0, nil, true)
    said = nil
    stressed do
      said = [store, tcp].map do |each|
        # Nobody but the call holds these strings.
        each.set(+"key1", +"value2")
        each.multi_set(%w[a b], %w[1 2])
        [each.get("key1"), each.add("n", 4), each.multi_get(%w[b a]), each.compare_set("c", "", "1"), each.check([:a, :b])]
      end
    end
    assert_equal [["value2", 4, %w[2 1], "1", true]] * 2, said
  ensure
    tcp&.close
  end

  def test_operations_under_stress
    sums = world(2) do |rank|
      stressed(rank) do
        tensor = Torch.tensor([rank + 1.0])
        Distributed.all_reduce(tensor)
        Distributed.all_reduce(tensor, async_op: true).wait
        tensor.item
      end
    end
    assert_equal [6.0, 6.0], sums
  end

  def test_training_under_stress
    gradients = world(2) do |rank|
      model = Torch::NN::Parallel::DistributedDataParallel.new(Torch::NN::Linear.new(2, 1))
      stressed(rank) do
        2.times { model.call(Torch.full([1, 2], rank + 1.0)).sum.backward }
      end
      model.parameters.map { |parameter| parameter.grad.to_a.flatten }
    end
    assert_equal gradients[0], gradients[1]
    assert_equal [3.0, 3.0, 2.0], gradients[0].flatten.sort.reverse
  end

  def test_compaction
    skip "this Ruby cannot compact" unless GC.respond_to?(:compact)
    sums = world(2) do |rank|
      group = Distributed.default_process_group
      tensor = Torch.tensor([rank + 1.0])
      store = Distributed::HashStore.new
      works = Array.new(5) do
        GC.compact
        store.set("k" * 30, "v")
        Distributed.all_reduce(tensor, group: group, async_op: true)
      end
      GC.compact
      works.each(&:wait)
      [tensor.item, store.get("k" * 30)]
    end
    assert_equal [[48.0, "v"]] * 2, sums
  end

  def test_forgotten_works_free_their_memory
    grown = world(2) do |rank|
      run = lambda do |times|
        times.times { Distributed.all_reduce(Torch.ones(1 << 18), async_op: true) }
        Distributed.barrier
        GC.start
        File.read("/proc/self/statm").split[1].to_i * 4096
      end
      2.times { run.call(120) }
      before = run.call(120)
      run.call(120) - before
    end
    grown.each { |bytes| assert_operator bytes, :<, 40 << 20 }
  end

  def test_models_are_freed_with_their_buckets
    grown = world(1) do
      run = lambda do
        20.times do
          model = Torch::NN::Parallel::DistributedDataParallel.new(Torch::NN::Linear.new(512, 512))
          2.times { model.call(Torch.ones(1, 512)).sum.backward }
        end
        GC.start
        File.read("/proc/self/statm").split[1].to_i * 4096
      end
      3.times { run.call }
      before = run.call
      run.call - before
    end
    assert_operator grown.first, :<, 20 << 20
  end
end
