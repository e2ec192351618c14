# frozen_string_literal: true

require_relative "test_helper"

# The shorter forms of what PyTorch has.
class SurfaceTest < Minitest::Test
  OPERATIONS = Distributed::GroupOperations

  def test_shorter_names_and_values_on_two_ranks
    found = world(2) do |rank|
      mine = Torch.tensor([rank + 1.0, 5.0])
      later = Distributed.all_gather(mine, async_op: true)
      later.wait
      {ranks: [Distributed.rank, Distributed.world_size, Distributed.main?], main: Distributed.on_main { :here },
       all: Distributed.all_gather(mine).map(&:to_a), later: later.result.map(&:to_a),
       column: Distributed.all_gather(Torch.tensor([[1, 2], [3, 4]]).select(1, rank)).map(&:to_a),
       none: Distributed.all_gather(Torch.tensor(rank)).map { |each| [each.item, each.shape, each.dtype] },
       one: Distributed.gather(mine, dst: 1)&.map(&:to_a), zero: Distributed.gather(mine)&.map(&:to_a),
       coalesced: Distributed.coalescing_manager { break failure { Distributed.all_gather(mine) } },
       wrong: [failure { Distributed.all_gather(5) }, failure { Distributed.all_gather([mine, mine]) }, failure { Distributed.on_main }]}
    end
    both = [[1.0, 5.0], [2.0, 5.0]]
    assert_equal [[0, 2, true], [1, 2, false]], found.map { |each| each[:ranks] }
    assert_equal [:here, nil], found.map { |each| each[:main] }
    found.each do |each|
      assert_equal [both, both, [[1, 3], [2, 4]]], each.values_at(:all, :later, :column)
      assert_equal [[0, [], :int64], [1, [], :int64]], each[:none]
      assert_match(/GroupError all_gather: expected a list to gather into/, each[:coalesced].join(" "))
      assert_equal ["tensor: expected a Torch::Tensor, got 5 (Integer)", "tensor: expected a Torch::Tensor, got nil (NilClass)",
        "on_main needs a block"], each[:wrong].map(&:last)
    end
    assert_equal [[nil, both], [both, nil]], found.map { |each| each.values_at(:one, :zero) }
  end

  def test_methods_of_a_group
    found = world(2) do |rank|
      pair = Distributed.new_group([0, 1])
      alone = Distributed.new_group([1])
      x = Torch.tensor([rank + 1.0])
      sums = [pair.all_reduce(x.clone).item, pair.all_reduce(x.clone, op: :max).item]
      rank.zero? ? pair.send(x, dst: 1) : pair.recv(received = Torch.zeros(1))
      _, warning = capture_io { sums << alone.all_reduce(x.clone)&.item }
      together = [x.clone, x.clone]
      pair.coalescing_manager { together.each { |each| pair.all_reduce(each) } }
      [sums, received&.item, warning, pair.barrier, pair.all_gather(x).map(&:item), pair.all_gather_object(rank),
        pair.broadcast(x.clone, group_src: 1).item, together.map(&:item), pair.send(:rank), failure { pair.barrier(group: alone) }]
    end
    found.each_with_index do |(sums, received, warning, *values, wrong), rank|
      assert_equal [[3.0, 2.0, [nil, 2.0][rank]], [nil, 1.0][rank]], [sums, received]
      rank.zero? ? assert_match(/warning: all_reduce on a group that global rank 0 is not in/, warning) : assert_empty(warning)
      assert_equal [nil, [1.0, 2.0], [0, 1], 2.0, [3.0, 3.0], rank], values
      assert_match(/barrier: unknown keyword: group/, wrong.last)
    end
  end

  # Each of Torch::Distributed's that takes a group, and is documented; none hides what a group or any object has.
  def test_no_operation_is_missing
    source = File.read(OPERATIONS.instance_method(:send).source_location.first)
    documented = source.scan(/@!method (\w+)/).flatten.map(&:to_sym)
    assert_equal (OPERATIONS.instance_methods(false) - [:send]).sort, documented.sort
    assert_operator documented.size, :>, 20
    own = Distributed::ProcessGroup.instance_methods(false) | (Object.instance_methods - [:send])
    assert_empty own & OPERATIONS.instance_methods(false)
  end

  def test_stores_as_hashes
    Dir.mktmpdir do |folder|
      hash = Distributed::HashStore.new
      tcp = Distributed::TCPStore.new("127.0.0.1", 0, nil, true)
      [hash, tcp, Distributed::FileStore.new(File.join(folder, "store")), Distributed::PrefixStore.new("p", hash)].each do |store|
        store["a"] = "1"
        store[:empty] = ""
        assert_equal ["1", "1", "", nil], [store["a"], store[:a], store["empty"], store["none"]]
        assert_equal ["1", 7, nil, "none!"], [store.fetch("a"), store.fetch("none", 7), store.fetch("none", nil), store.fetch("none") { |key| "#{key}!" }]
        assert_equal [true, true, false], %w[a empty none].map { |key| store.key?(key) }
        error = assert_raises(KeyError) { store.fetch(:none) }
        assert_equal ["key not found: :none", :none, store], [error.message, error.key, error.receiver]
        refute store.check(["none"])
      end
      tcp.close
    end
  end

  def test_in_place_names_of_clipping
    parameter = Torch::NN::Parameter.new(Torch.zeros(2))
    parameter.grad = Torch.tensor([3.0, 4.0])
    assert_equal 5.0, Torch::NN::Utils.clip_grad_norm!([parameter], 1.0).item
    assert_in_delta 1.0, parameter.grad.norm.item, 1e-5
    Torch::NN::Utils.clip_grads_with_norm!([parameter], 0.5, 1.0)
    assert_in_delta 0.5, parameter.grad.norm.item, 1e-5
    Torch::NN::Utils.clip_grad_value!([parameter], 0.1)
    parameter.grad.to_a.each { |value| assert_in_delta 0.1, value, 1e-6 }
    [Distributed::Parallel, Distributed::FSDP::FSDPModule, Distributed::FSDP::FullyShardedDataParallel].each do |owner|
      assert_equal owner.instance_method(:clip_grad_norm_), owner.instance_method(:clip_grad_norm!)
    end
  end

  def test_loaders_are_enumerable
    [0, 2].each do |workers|
      loader = Torch::Utils::Data::DistributedDataLoader.new([1, 2, 3, 4, 5], batch_size: 2, num_workers: workers, collate_fn: :itself.to_proc)
      assert_equal [[1, 2], [3, 4], [5]], loader.to_a
      assert_equal [[[1, 2]], [2, 2, 1], [[[1, 2], 0], [[3, 4], 1], [[5], 2]]], [loader.first(1), loader.map(&:size), loader.each_with_index.to_a]
      assert_equal [3, 2, 1, [3, 4]], [loader.count, loader.count { |batch| batch.size == 2 }, loader.count([5]), loader.lazy.drop(1).first]
    end
    sampler = Torch::Utils::Data::DistributedSampler.new(6, num_replicas: 2, rank: 1, shuffle: false)
    assert_equal [[1, 3, 5], [[1, 3], [5]]], [sampler.to_a, sampler.each_slice(2).to_a]
  end

  # In a process that has loaded nothing else.
  def test_one_require_has_everything
    out, status = Open3.capture2e(RbConfig.ruby, *$LOAD_PATH.flat_map { |each| ["-I", each] }, "-e", <<~RUBY)
      require "torch/distributed"
      p [!Torch::NN.autoload?(:DataParallel).nil?, Torch::NN::DataParallel.equal?(Torch::NN::Parallel::DataParallel), Torch::NN::DataParallel]
    RUBY
    assert status.success?, out
    assert_equal "[true, true, Torch::NN::Parallel::DataParallel]", out.lines.last.chomp
  end

  def test_numbers_of_processes_that_contradict_each_other
    error = assert_raises(ArgumentError) { Distributed.run(2, processes: 3, device: "cpu") { flunk } }
    assert_equal "processes: 3, but 2 were asked for before: give one of the two", error.message
  end
end
