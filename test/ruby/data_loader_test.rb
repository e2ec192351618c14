# frozen_string_literal: true

require_relative "test_helper"

class DistributedDataLoaderTest < Minitest::Test
  Data = Torch::Utils::Data
  Loader = Data::DistributedDataLoader

  # Examples that are arrays of a tensor, a number and a text.
  class Examples < Data::Dataset
    attr_reader :size

    def initialize(size, &before)
      @size = size
      @before = before
    end

    def [](index)
      @before&.call(index)
      [Torch.tensor([index.to_f, -index.to_f]), index * 10, "example #{index}"]
    end
  end

  # Batches of its own.
  class Batches < Data::Dataset
    def size = 5

    def fetch(indices) = [:whole, indices]

    def [](index) = [:single, index]
  end

  def plain(batch)
    case batch
    when Torch::Tensor then [batch.dtype, batch.to_a]
    when Array then batch.map { |each| plain(each) }
    else batch
    end
  end

  def threads
    Thread.list.select { |thread| thread.name == "torch-ddp data" && thread.alive? }
  end

  def teardown
    assert_empty threads
  end

  def test_batches_are_those_of_torch_rb
    images = Torch.rand(10, 2, 3)
    [Examples.new(10), Data::TensorDataset.new(images, Torch.arange(10), Torch.rand(10, dtype: :float64)), (0...10).to_a,
      Array.new(7) { |i| [i, [i.to_f, Torch.ones(2) * i]] }].each do |dataset|
      expected = Data::DataLoader.new(dataset, batch_size: 4).map { |batch| plain(batch) }
      [0, 1, 3].each do |workers|
        loader = Loader.new(dataset, batch_size: 4, num_workers: workers)
        2.times { assert_equal expected, loader.map { |batch| plain(batch) } }
        assert_equal expected, loader.each.to_a.map { |batch| plain(batch) }
        assert_equal [expected.size] * 3, [loader.size, loader.length, loader.count]
      end
    end
  end

  # Tensors on "meta" have no elements: what shows that they were moved, without a GPU.
  def test_batches_are_on_the_device_in_their_dtypes
    collate = lambda do |batch|
      {"x" => Torch.ones(batch.size, 2, dtype: :float64), :more => [[Torch.tensor(batch, dtype: :int16)], "text", batch.size]}
    end
    {nil => "cpu", "cpu" => "cpu", :meta => "meta", Torch.device("meta") => "meta"}.each do |device, expected|
      [0, 2].each do |workers|
        loader = Loader.new((0...5).to_a, batch_size: 3, collate_fn: collate, num_workers: workers, device: device)
        batches = loader.to_a
        tensors = batches.map { |batch| [batch["x"], batch[:more][0][0]] }
        assert_equal [expected] * 4, tensors.flatten.map { |tensor| Torch::Distributed._device_name(tensor.device) }
        assert_equal [[[3, 2], [3]], [[2, 2], [2]]], tensors.map { |pair| pair.map(&:shape) }
        assert_equal [%i[float64 int16]] * 2, tensors.map { |pair| pair.map(&:dtype) }
        assert_equal [["text", 3], ["text", 2]], batches.map { |batch| batch[:more].drop(1) }
      end
    end
    given = [[Torch.ones(1)]]
    assert_same given, Loader.new([1], collate_fn: ->(_) { given }).first
    whole = Loader.new(Data::TensorDataset.new(Torch.arange(4)), batch_size: 4, device: "cpu").first
    assert_equal [[0, 1, 2, 3]], whole.map(&:to_a)
  end

  def test_enumerable
    [0, 2].each do |workers|
      read = []
      loader = Loader.new(Examples.new(10) { |index| read << index }, batch_size: 2, num_workers: workers, prefetch_factor: 1)
      labels = loader.lazy.map { |_, numbers| numbers.to_a }.reject { |numbers| numbers.first == 20 }.first(2)
      assert_equal [[0, 10], [40, 50]], labels
      assert_empty threads
      assert_operator read.size, :<=, 2 * (3 + workers)
      assert_equal [5, 4], [loader.each.size, loader.each_with_index.to_a.last[1]]
      assert_equal [[0, 20, 40], [60, 80]], loader.each_slice(3).map { |slice| slice.map { |_, numbers| numbers[0].item } }
      assert_equal 450, loader.sum { |_, numbers| numbers.sum.item }
    end
  end

  def test_order_length_and_epochs_are_the_samplers
    dataset = (0...11).to_a
    sampler = Data::DistributedSampler.new(dataset, num_replicas: 2, rank: 1, seed: 4)
    loader = Loader.new(dataset, batch_size: 4, sampler: sampler, collate_fn: ->(batch) { batch })
    loader.set_epoch(3)
    assert_equal 3, sampler.epoch
    assert_equal sampler.to_a.each_slice(4).to_a, loader.to_a
    assert_equal [2, [4, 2]], [loader.size, loader.map(&:size)]
    dropping = Loader.new(dataset, batch_size: 4, sampler: sampler, drop_last: true, collate_fn: ->(batch) { batch })
    assert_equal [1, [4]], [dropping.size, dropping.map(&:size)]
    shuffled = Loader.new(dataset, batch_size: 11, shuffle: true, seed: 7, collate_fn: ->(batch) { batch })
    assert_equal Data::DistributedSampler.new(11, num_replicas: 1, rank: 0, seed: 7).to_a, shuffled.first
  end

  def test_other_samplers
    ids = ->(batch) { batch }
    assert_equal [[4, 2], [0]], Loader.new((0...5).to_a, batch_size: 2, sampler: [4, 2, 0], collate_fn: ids).to_a
    batches = Loader.new((0...5).to_a, batch_sampler: [[4, 2, 0], [1]], collate_fn: ids, num_workers: 2)
    assert_equal [[[4, 2, 0], [1]], 2, nil], [batches.to_a, batches.size, batches.batch_size]
    endless = Loader.new((0...5).to_a, batch_size: 2, sampler: [1, 3].cycle, collate_fn: ids, num_workers: 2)
    assert_equal [[1, 3]] * 6, endless.first(6)
  end

  def test_whole_batches
    assert_equal [[:whole, [0, 1, 2]], [:whole, [3, 4]]], Loader.new(Batches.new, batch_size: 3).to_a
    own = Loader.new(Batches.new, batch_size: 3, collate_fn: ->(batch) { batch })
    assert_equal [[:single, 0], [:single, 1], [:single, 2]], own.first
    of_tensors = Loader.new(Data::TensorDataset.new(Torch.arange(4)), batch_size: 2, collate_fn: ->(batch) { batch.map { |(x)| x.item } })
    assert_equal [[0, 1], [2, 3]], of_tensors.to_a
    changed = Class.new(Data::TensorDataset) { def [](index) = super.map { |tensor| -tensor } }.new(Torch.arange(3))
    assert_equal [[0, -1, -2]], Loader.new(changed, batch_size: 3).first.map(&:to_a)
  end

  def test_the_parts_of_a_group
    parts = world(2) { Loader.new((0...10).to_a, batch_size: 2, shuffle: true, num_workers: 1).flat_map(&:to_a) }
    assert_equal [5, 5], parts.map(&:size)
    assert_equal (0...10).to_a, parts.flatten.sort
  end

  def test_reading_ahead_is_bounded_and_in_order
    read = Thread::Queue.new
    slow = Examples.new(40) do |index|
      Thread.pass if (index % 4).zero?
      read << index
    end
    loader = Loader.new(slow, batch_size: 2, num_workers: 3, prefetch_factor: 2)
    most = 0
    texts = loader.each_with_index.flat_map do |(_, _, names), index|
      # The first batches are taken once all that may be read ahead has been, and the threads wait.
      await("six batches to be read ahead") { read.size >= 2 * (index + 7) && threads.all?(&:stop?) } if index < 5
      most = [most, read.size - 2 * (index + 1)].max
      names
    end
    assert_equal Array.new(40) { |i| "example #{i}" }, texts
    assert_equal 2 * 6, most
  end

  def test_an_exception_comes_to_the_training_thread
    [0, 2].each do |workers|
      loader = Loader.new(Examples.new(10) { |index| raise IndexError, "no example #{index}" if index == 5 }, batch_size: 2, num_workers: workers)
      seen = []
      error = assert_raises(IndexError) { loader.each { |_, labels| seen << labels.to_a } }
      assert_equal [[[0, 10], [20, 30]], "no example 5"], [seen, error.message]
      assert_match(/data_loader_test.rb:\d+:in .*test_an_exception_comes/, error.backtrace[0])
      assert(error.backtrace.any? { |line| line.include?("batch_fetcher.rb") })
    end
    assert_raises(NotImplementedError) { Loader.new(Examples.new(2) { raise NotImplementedError }, num_workers: 1).first }
    assert_raises(SystemExit) { Loader.new(Examples.new(2) { exit 3 }, num_workers: 1).first }
  end

  def test_no_thread_is_left_behind
    hanging = Loader.new(Examples.new(100) { |index| sleep if index == 7 }, batch_size: 2, num_workers: 2)
    hanging.each { break }
    assert_empty threads
    assert_raises(RuntimeError) { hanging.each { raise "boom" } }
    assert_empty threads
    assert_raises(Timeout::Error) { Timeout.timeout(0.5) { hanging.to_a } }
    assert_empty threads
    assert_equal :done, catch(:out) { hanging.each { throw :out, :done } }
    assert_empty threads
  end

  def test_an_enumerator_that_is_left
    # On a stack of their own, on which the collector finds nothing of them later.
    Thread.new { 5.times { Loader.new(Examples.new(100), num_workers: 2).each.next } }.join
    await("the threads to end") { GC.start || threads.empty? }
  end

  def test_interrupt
    reader, writer = IO.pipe
    data = Array.new(1000) { |i| i }
    data.define_singleton_method(:[]) do |index|
      sleep 0.01
      super(index)
    end
    pid = fork do
      trap("INT", "DEFAULT")
      Loader.new(data, batch_size: 10, num_workers: 2).each_with_index { |_, index| Process.kill(:INT, Process.pid) if index == 1 }
    rescue Interrupt
      writer.write(Thread.list.size)
    ensure
      exit!(0)
    end
    writer.close
    assert_equal ["1", 0], [reader.read, Process.wait2(pid)[1].exitstatus]
    reader.close
  end

  def test_a_forked_child_goes_on
    loader = Loader.new((0...20).to_a, batch_size: 2, num_workers: 2)
    reader, writer = IO.pipe
    loader.each_with_index do |_, index|
      next unless index == 2

      pid = fork do
        inherited = loader.map(&:to_a).flatten
        writer.write(inherited.inspect, Thread.list.size)
        exit!(0)
      end
      Process.wait(pid)
    end
    writer.close
    assert_equal (0...20).to_a.inspect + "1", reader.read
    reader.close
  end

  def test_a_child_within_the_loop
    reader, writer = IO.pipe
    child = nil
    rest = []
    Loader.new((0...12).to_a, batch_size: 2, num_workers: 2).each_with_index do |batch, index|
      rest.concat(batch.to_a) if index > 1
      child = fork if index == 1
    end
    unless child
      writer.write(rest.inspect)
      exit!(0)
    end
    Process.wait(child)
    writer.close
    assert_equal [(4...12).to_a.inspect, (4...12).to_a], [reader.read, rest]
    reader.close
  end

  def test_going_on_within_an_epoch
    [0, 2].each do |workers|
      make = -> { Loader.new((0...23).to_a, batch_size: 4, shuffle: true, num_workers: workers) }
      first = make.call
      first.set_epoch(2)
      whole = first.map(&:to_a)
      had = first.first(3).map(&:to_a)
      state = Marshal.load(Marshal.dump(first.state_dict))
      assert_equal 12, state["sampler"]["position"]
      second = make.call.load_state_dict(state)
      second.set_epoch(2)
      assert_equal whole, had + second.map(&:to_a)
      assert_equal whole, second.map(&:to_a)
      assert_equal 23, second.state_dict["sampler"]["position"]
    end
  end

  def test_going_on_with_a_plain_sampler
    make = -> { Loader.new((0...10).to_a, batch_size: 2, sampler: [9, 8, 7, 6, 5, 4, 3], num_workers: 1) }
    first = make.call
    first.first(2)
    assert_equal({"batches" => 2, "epoch" => 0, "finished" => false}, first.state_dict)
    second = make.call.load_state_dict(first.state_dict)
    assert_equal [[5, 4], [3]], second.map(&:to_a)
    assert_equal [[9, 8], [7, 6], [5, 4], [3]], second.map(&:to_a)
    assert_raises(ArgumentError) { second.load_state_dict({"sampler" => {}}) }
  end

  def test_a_finished_epoch_is_finished
    {"batch_sampler" => {batch_sampler: [[0, 1], [2]]}, "sampler" => {sampler: [0, 1, 2], batch_size: 2},
     "dropped" => {sampler: Data::DistributedSampler.new(5, num_replicas: 1, rank: 0, shuffle: false), batch_size: 2, drop_last: true}}.each_value do |options|
      make = -> { Loader.new((0...5).to_a, **options) }
      first = make.call
      whole = first.map(&:to_a)
      assert_equal [2, [whole] * 2], [whole.size, make.call.load_state_dict(first.state_dict).then { |loader| Array.new(2) { loader.map(&:to_a) } }]
      finished = first.state_dict
      first.first
      [[finished, 0, []], [finished, 1, whole], [first.state_dict, 0, whole.drop(1)], [first.state_dict, 1, whole]].each do |state, epoch, rest|
        second = make.call.load_state_dict(state)
        second.set_epoch(epoch)
        assert_equal [rest, whole], [second.map(&:to_a), second.map(&:to_a)]
      end
    end
  end

  # Of two processes with batches of three, gone on by three with batches of two: each example once.
  def test_going_on_with_other_processes_and_batches
    parts = lambda do |replicas, size|
      Array.new(replicas) do |rank|
        Loader.new((0...24).to_a, batch_size: size, sampler: Data::DistributedSampler.new(24, num_replicas: replicas, rank: rank, seed: 3))
      end
    end
    first = parts.call(2, 3)
    had = first.flat_map { |loader| loader.first(2).flat_map(&:to_a) }
    second = parts.call(3, 2).each { |loader| loader.load_state_dict(first[0].state_dict) }
    rest = second.map { |loader| loader.flat_map(&:to_a) }
    assert_equal [[4, 4, 4], (0...24).to_a, 8], [rest.map(&:size), (had + rest.flatten).sort, second[0].flat_map(&:to_a).size]
  end

  # Each loader has a position of its own; the sampler's is that of the loop that is given something.
  def test_loaders_on_one_sampler
    sampler = Data::DistributedSampler.new(12, num_replicas: 1, rank: 0, shuffle: false)
    one, two = [2, 3].map { |size| Loader.new((0...12).to_a, batch_size: size, sampler: sampler) }
    positions = -> { [one, two].map { |loader| loader.state_dict["sampler"]["position"] } << sampler.state_dict["position"] }
    one.each_with_index do |_, index|
      two.first if index == 1
      break if index == 2
    end
    assert_equal [6, 3, 6], positions.call
    states = [one, two].map(&:state_dict)
    one.to_a
    two.load_state_dict(states[1])
    one.load_state_dict(states[0])
    assert_equal [[[3, 4, 5], [6, 7, 8], [9, 10, 11]], [[6, 7], [8, 9], [10, 11]]], [two, one].map { |loader| loader.map(&:to_a) }
    # The sampler's own state goes to the next loop, and where both were loaded it is used once.
    [one, sampler].zip([states[0], states[0]["sampler"]]) { |each, state| each.load_state_dict(state) }
    assert_equal [3, 6], [one.to_a.size, one.to_a.size]
    # What is left of a loader's part can be asked of its sampler, and another loader leaves it there.
    one.load_state_dict(states[0])
    assert_equal [6, 4, 3], [sampler.remaining, two.to_a.size, one.to_a.size]
    sampler.load_state_dict(states[0]["sampler"])
    assert_equal [2, 4], [two.to_a.size, two.to_a.size]
  end

  def test_loops_within_the_one_that_counts
    [0, 2].product([{batch_sampler: (0...8).each_slice(2).to_a}, {batch_size: 2}]) do |workers, options|
      loader = Loader.new((0...8).to_a, num_workers: workers, **options)
      at = -> { loader.state_dict.then { |state| state["batches"] || state["sampler"]["position"] / 2 } }
      looks = [-> { loader.first }, -> { loader.to_a }, -> { loader.each { loader.first(2) && break } }, -> { workers.zero? ? loader.zip(loader) : loader.lazy.first(3) }]
      loader.each_with_index do |_, index|
        looks[index].call
        assert_equal index + 1, at.call
      end
      assert_equal 4, at.call
    end
  end

  def test_mistakes
    data = (0...4).to_a
    mistakes = {
      /batch_size: expected 1 or more, got 0/ => {batch_size: 0}, /num_workers: expected 0 or more/ => {num_workers: -1},
      /prefetch_factor/ => {prefetch_factor: 0}, /shuffle: the sampler decides/ => {sampler: [1], shuffle: true},
      /batch_sampler: it stands instead/ => {batch_sampler: [[1]], batch_size: 2}
    }
    mistakes.each { |text, options| assert_match text, assert_raises(ArgumentError) { Loader.new(data, **options) }.message }
    {5 => /device: expected a String.*got 5/, "gpu" => /device: expected one that can be used here, got "gpu"/}.each do |device, text|
      assert_match text, assert_raises(ArgumentError, TypeError) { Loader.new(data, device: device) }.message
    end
    unless Torch::CUDA.available?
      assert_match(/got "cuda:0"/, assert_raises(ArgumentError) { Loader.new(data, device: Torch.device("cuda:0")) }.message)
    end
    assert_match(/IterableDataset/, assert_raises(ArgumentError) { Loader.new(Data::IterableDataset.new) }.message)
  end
end
