# frozen_string_literal: true

require_relative "test_helper"

# Backends in Ruby: one that exchanges everything through its store, beside gloo.
class BackendTest < Minitest::Test
  Backend = Distributed::Backend

  # Every rank publishes its tensors, and reads the others'.
  class OverStore < Backend
    attr_reader :ended

    def all_reduce(tensor, op:)
      tensor.copy!(combine(exchange([tensor]).map(&:first), op))
      Finished.new
    end

    def reduce(tensor, dst:, op:)
      result = combine(exchange([tensor]).map(&:first), op)
      tensor.copy!(result) if rank == dst
    end

    def broadcast(tensor, src:)
      tensor.copy!(exchange([tensor])[src].first)
      nil
    end

    def barrier
      exchange([])
    end

    def all_gather(tensors, tensor)
      exchange([tensor]).each_with_index { |(each), rank| tensors[rank].copy!(each) }
    end

    def gather(tensor, tensors, dst:)
      exchange([tensor]).each_with_index { |(each), rank| tensors&.at(rank)&.copy!(each) }
    end

    def scatter(tensor, tensors, src:)
      tensor.copy!(exchange(tensors || [])[src][rank])
    end

    def reduce_scatter(tensor, tensors, op:)
      tensor.copy!(combine(exchange(tensors).map { |each| each[rank] }, op))
    end

    def all_to_all(outputs, inputs)
      exchange(inputs).each_with_index { |each, rank| outputs[rank].copy!(each[self.rank]) }
    end

    # What is waited for.
    class Finished
      def wait
        true
      end
    end

    private

    def exchange(tensors)
      @count = (@count || 0) + 1
      store.set("#{@count}/#{rank}", Marshal.dump(tensors.map { |each| [each.to_a, each.dtype] }))
      Array.new(size) { |from| Marshal.load(store.get("#{@count}/#{from}")).map { |values, dtype| Torch.tensor(values, dtype: dtype) } }
    end

    def combine(tensors, op)
      case op
      when Torch::Distributed::ReduceOp::SUM then tensors.inject(:+)
      when Torch::Distributed::ReduceOp::AVG then tensors.inject(:+) / size
      when Torch::Distributed::ReduceOp::PremulSum then tensors.inject(:+) * op.factor
      else raise Torch::Distributed::UnsupportedError, "only sums"
      end
    end
  end

  # What the backends of a test are registered as; a process registers a name once.
  def over(size, backend, func = OverStore)
    Timeout.timeout(LIMIT) do
      Distributed.fork_world(size) do |rank, _|
        Backend.register_backend("mine", func)
        Distributed.init_process_group(backend, timeout: LIMIT / 2) { yield rank }
      end
    end
  end

  def every_operation(rank)
    size = Distributed.get_world_size
    x = Torch.arange(6, dtype: :float32).view(2, 3) * (rank + 1)
    parts = Array.new(size) { |to| Torch.tensor([rank * 10.0 + to, 1.5]) }
    summed, averaged, weighted, whole, bytes = Array.new(4) { x.clone } << Torch.tensor([rank, 255], dtype: :uint8)
    Distributed.all_reduce(summed)
    Distributed.all_reduce(averaged.t, op: :avg)
    work = Distributed.all_reduce(weighted, op: Distributed::ReduceOp.premul_sum(0.5), async_op: true)
    Distributed.broadcast(whole, src: size - 1)
    Distributed.broadcast(bytes, src: size - 1)
    work.wait
    Distributed.barrier
    reduced = x.clone
    Distributed.reduce(reduced, dst: size - 1)
    gathered = Array.new(size) { Torch.zeros(2, 3) }
    Distributed.all_gather(gathered, x)
    collected = Array.new(size) { Torch.zeros(2, 3) } if rank.zero?
    Distributed.gather(x, collected, dst: 0)
    scattered = Torch.zeros(2)
    Distributed.scatter(scattered, (parts if rank == size - 1), src: size - 1)
    share = Torch.zeros(2)
    Distributed.reduce_scatter(share, parts)
    received = Array.new(size) { Torch.zeros(2) }
    Distributed.all_to_all(received, parts)
    [summed, averaged, weighted, whole, bytes, reduced, gathered, collected, scattered, share, received, Torch.zeros(0)]
      .flatten.compact.map(&:to_a) << Distributed.all_gather_object(nil, [rank])
  end

  def test_values_are_those_of_gloo
    [1, 2, 3].each do |size|
      assert_equal world(size) { |rank| every_operation(rank) }, over(size, "mine") { |rank| every_operation(rank) }
    end
  end

  def test_a_group_of_some_ranks_and_a_backend_for_one_device
    results = over(3, "gloo") do |rank|
      group = Distributed.new_group([0, 2], backend: "mine")
      other = Distributed.new_group(backend: "cpu:mine")
      x = Torch.tensor([rank + 1.0])
      Distributed.all_reduce(x, group: group) unless rank == 1
      Distributed.all_reduce(x, group: other)
      [x.item, other.backend]
    end
    assert_equal [[10.0, "cpu:mine"]] * 3, results
  end

  def test_data_parallel_training_over_it
    step = lambda do |rank, *|
      Torch.manual_seed(rank)
      model = Torch::NN::Sequential.new(Torch::NN::Linear.new(3, 4), Torch::NN::ReLU.new, Torch::NN::Linear.new(4, 1))
      ddp = Torch::NN::Parallel::DistributedDataParallel.new(model)
      optimizer = Torch::Optim::SGD.new(ddp.parameters, lr: 0.1)
      3.times do |at|
        optimizer.zero_grad
        ddp.call(Torch.full([2, 3], rank + at + 1.0)).sum.backward
        optimizer.step
      end
      ddp.parameters.map { |each| each.to_a.flatten }
    end
    expected = world(2, &step)
    assert_equal expected[0], expected[1]
    over(2, "mine", &step).each do |parameters|
      parameters.zip(expected[0]) { |mine, gloo| mine.zip(gloo) { |a, b| assert_in_delta a, b, 1e-6 } }
    end
  end

  def test_operations_that_it_does_not_have_are_refused_at_once
    sum_only = Class.new(Backend) do
      define_method(:all_reduce) { |tensor, op:| tensor.fill!(op) }
    end
    results = over(2, "mine", sum_only) do
      refused = [failure { Distributed.barrier }, failure { Distributed.broadcast(Torch.ones(1), src: 0) }]
      x = Torch.ones(2)
      Distributed.all_reduce(x, op: :max)
      refused << x.to_a << failure { Distributed.send(Torch.ones(1), dst: 0) }
    end
    results.each do |(first, second, values, third)|
      assert_equal [["Torch::Distributed::UnsupportedError"] * 3, [4.0, 4.0]], [[first, second, third].map(&:first), values]
      assert_match(/: backend mine has no barrier\z/, first.last)
      assert_match(/: backend mine has no broadcast\z/, second.last)
      assert_match(/mine has no send/, third.last)
    end
  end

  # Rank 1 raises; rank 0, which waits for it in Ruby, is interrupted, and its `shutdown` is called all the same.
  def test_an_error_on_one_rank_is_raised_on_all
    reader, writer = IO.pipe
    failing = Class.new(OverStore) do
      define_method(:all_reduce) do |tensor, op:|
        raise IOError, "the disk is full" if rank == 1

        super(tensor, op: op)
      end
      define_method(:shutdown) { writer.write(rank.to_s) }
    end
    results = over(2, "mine", failing) { failure { Distributed.all_reduce(Torch.ones(1)) } }
    writer.close
    assert_equal %w[0 1], reader.read.chars.sort
    assert_equal "Torch::Distributed::InternalError", results[1].first
    assert_match(/backend mine: IOError: the disk is full \(.*backend_test\.rb:\d+/, results[1].last)
    assert_match(/the disk is full/, results[0].last)
  end

  def test_time_is_up
    stuck = Class.new(Backend) { define_method(:barrier) { Thread.stop } }
    results = over(1, "mine", stuck) do
      Distributed.set_timeout(0.2) # of the barrier: a loaded machine takes longer to make the group
      failure { Distributed.barrier }
    end
    assert_equal "Torch::Distributed::TimeoutError", results[0].first
    assert_match(/backend mine has not completed it in time/, results[0].last)
  end

  def test_an_object_that_cannot_be_made
    results = over(1, "gloo", ->(*) { raise IOError, "no network" }) { failure { Distributed.new_group(backend: "mine") } }
    assert_match(/backend mine: IOError: no network/, results[0].last)
  end

  def test_wrong_arguments_are_named
    results = over(1, "gloo") do
      {
        /name: gloo is a backend already/ => ["gloo", OverStore], /name: mine is a backend already/ => [:mine, OverStore],
        /a b.*letters, digits/ => ["a b", OverStore], /func: expected a Class/ => ["other", 3]
      }.map { |pattern, arguments| [pattern, failure { Backend.register_backend(*arguments) }] } <<
        [/devices: .*got "xpu"/, failure { Backend.register_backend("other", OverStore, devices: %w[cpu xpu]) }]
    end
    results[0].each { |pattern, (_, message)| assert_match(pattern, message) }
    assert_nil failure { Backend.register_backend("test_devices", OverStore, devices: :cpu) }
  end
end
