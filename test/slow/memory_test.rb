# frozen_string_literal: true

require_relative "../ruby/test_helper"

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

  def test_lists_under_stress
    results = world(2) do |rank|
      mine, ten, got = [rank + 1.0, rank * 10.0 + 10, 0.0].map { |value| Torch.tensor([value]) }
      list, swapped = Array.new(2) { Array.new(2) { Torch.zeros(1) } }
      stressed(rank) do
        Distributed.all_gather(list, mine)
        received = Distributed.irecv(got, src: 1 - rank)
        Distributed.send(mine, dst: 1 - rank)
        received.wait
        Distributed.all_to_all(swapped, [mine, ten], async_op: true).wait
        Distributed.all_reduce_coalesced([got, mine])
      end
      [*list, got, *swapped, mine].map(&:item)
    end
    assert_equal [[1, 2, 3, 1, 2, 3], [1, 2, 3, 10, 20, 3]], results
  end

  # Their memory is in Strings that only the tensors hold, and the tensors in Arrays that nobody holds.
  def test_lists_of_a_forgotten_operation_stay
    bytes = 300_000
    start = lambda do
      lists = Array.new(2) { Array.new(2) { |i| Torch::ByteTensor.new(Torch::ByteStorage.from_buffer((i + 1).chr * bytes)) } }
      Distributed.all_to_all(*lists, async_op: true)
      Distributed.all_gather(lists.last, Torch.full([bytes], 7, dtype: :uint8), async_op: true)
      Distributed.irecv(Torch::ByteTensor.new(Torch::ByteStorage.from_buffer("\x01" * bytes)), src: 1)
      nil
    end
    forgotten = Event.new
    results = world(2) do |rank|
      start.call if rank.zero?
      3.times { GC.start }
      others = Array.new(40) { "\x05".b * bytes }
      forgotten.set if rank.zero?
      if rank == 1
        forgotten.wait
        got = Array.new(2) { Torch.zeros([bytes], dtype: :uint8) }
        Distributed.all_to_all(got, got.map { |tensor| tensor + 9 })
        Distributed.all_gather(got, Torch.full([bytes], 8, dtype: :uint8))
        Distributed.send(Torch.full([bytes], 6, dtype: :uint8), dst: 0)
      end
      Distributed.barrier
      [others.all? { |text| text.count("\x05") == bytes }, got&.map { |tensor| tensor.max.item }]
    end
    assert_equal [[true, nil], [true, [7, 8]]], results
  end

  def test_lists_of_an_interrupted_operation_stay
    forgotten = Event.new
    results = world(2) do |rank|
      Distributed.barrier
      if rank.zero?
        assert_raises(Timeout::Error) do
          Timeout.timeout(0.1) { Distributed.all_gather(Array.new(2) { Torch.ones(100_000) }, Torch.ones(100_000)) }
        end
        assert_raises(Timeout::Error) { Timeout.timeout(0.1) { Distributed.recv(Torch.ones(100_000), src: 1) } }
        GC.start
        others = Array.new(20) { Torch.zeros(100_000) }
        forgotten.set
      else
        forgotten.wait
        Distributed.all_gather(Array.new(2) { Torch.ones(100_000) }, Torch.ones(100_000) * 3)
        Distributed.send(Torch.ones(100_000), dst: 0)
      end
      Distributed.barrier
      GC.start
      others&.map { |tensor| tensor.abs.max.item }&.max
    end
    assert_equal [0.0, nil], results
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

  # What leaks grows from turn to turn; how much is in use at the height of one is left to chance.
  def grown_by(turns)
    half = turns.size / 2
    turns.last(half).min - turns.first(half).max
  end

  def test_forgotten_works_free_their_memory
    grown = world(2) do |rank|
      run = lambda do |times|
        times.times { Distributed.all_reduce(Torch.ones(1 << 18), async_op: true) }
        Distributed.barrier
        GC.start
        File.read("/proc/self/statm").split[1].to_i * 4096
      end
      grown_by(Array.new(6) { run.call(120) })
    end
    # Less than the works of one turn: what leaks would come to those of three.
    grown.each { |bytes| assert_operator bytes, :<, 120 << 20 }
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
      grown_by(Array.new(8) { run.call })
    end
    assert_operator grown.first, :<, 20 << 20
  end
end
