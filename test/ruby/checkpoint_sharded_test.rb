# frozen_string_literal: true

require_relative "sharded_checkpoints"

# Checkpoints of models and optimizers that ranks divide.
class CheckpointShardedTest < Minitest::Test
  include ShardedCheckpoints

  def setup
    @dir = Dir.mktmpdir
  end

  def teardown
    FileUtils.rm_rf(@dir)
  end

  # More of them in test/slow.
  def test_a_saved_run_goes_on_in_any_form
    assert_goes_on_in_any_form(@dir, [[4, :units, :adam], [2, :zero, :fused]])
  end

  # The other way round: what one process saved, by numbers.
  def test_a_plain_checkpoint_goes_into_sharded_models
    dir = @dir
    before, after = Distributed.fork_world(1) do
      run = run_of(:plain, :adam, 1)
      train(run, 0...3)
      Checkpoint.save(dir, **run, step: 3)
      Torch.save({"model" => run[:model].state_dict, "optimizer" => run[:optimizer].state_dict}, File.join(dir, "old.pt"))
      [values(run)].tap { train(run, 3...6) } << values(run)
    end.first
    {units: 3, zero: 2, wrapped: 4}.each do |strategy, ranks|
      said = world(ranks) do
        [dir, File.join(dir, "old.pt")].map do |path|
          run = run_of(strategy, :adam, 9)
          Checkpoint.load(path, **run)
          [values(run)].tap { train(run, 3...6) } << values(run)
        end
      end
      said.flatten(1).each do |restored, went_on|
        assert_equal before, restored
        assert_close after, went_on
      end
    end
  end

  class Low < Torch::NN::Module
    def initialize
      super
      @table = Torch::NN::Parameter.new(Torch.randn(5, 30).to(dtype: :bfloat16))
    end
  end

  # Parameters of several dtypes, each in its unit, and one that is not sharded.
  def mixed(seed)
    Torch.manual_seed(seed)
    linear = Torch::NN::Linear
    parts = [linear.new(9, 7), linear.new(7, 5).double, Low.new, linear.new(2, 2), Torch::NN::Embedding.new(1, 3)]
    net = Torch::NN::Sequential.new(*parts)
    parts.first(3).each { |each| FSDP.fully_shard(each) } && FSDP.fully_shard(net, ignored_params: parts[3].parameters) if Distributed.initialized?
    net
  end

  def test_several_dtypes
    dir = @dir
    saved = world(3) do |rank|
      net = mixed(1)
      Checkpoint.save(dir, model: net)
      FSDP.full_state_dict(net).transform_values { |tensor| [tensor.dtype, tensor.to(dtype: :float64).to_a] }
    end.first
    assert_equal %i[float32 float64 bfloat16], saved.values.map(&:first).uniq
    loaded = world(2) do
      net = mixed(2)
      Checkpoint.load(dir, model: net)
      FSDP.full_state_dict(net).transform_values { |tensor| [tensor.dtype, tensor.to(dtype: :float64).to_a] }
    end
    assert_equal [saved] * 2, loaded
    Checkpoint.load(dir, model: net = mixed(3))
    assert_equal(saved, net.state_dict.transform_values { |tensor| [tensor.dtype, tensor.detach.to(dtype: :float64).to_a] })
  end

  # Replicas have the same pieces: each is written once.
  def test_replicas_of_shards
    dir = @dir
    saved = world(4) do
      Torch.manual_seed(1)
      net = Net.new(hidden: 40)
      mesh = Distributed.init_device_mesh("cpu", [2, 2])
      FSDP.fully_shard(net, mesh: mesh)
      run = {model: net, optimizer: Torch::Optim::Adam.new(net.parameters.uniq(&:object_id), lr: 0.01)}
      train(run, 0...2)
      Checkpoint.save(dir, **run, step: 2)
      values(run)
    end.first
    manifest = Checkpoint::Manifest.read(Checkpoint.latest(dir))
    assert_equal 1600, manifest["tensors"]["model.tied.weight"]["pieces"].sum { |piece| piece["count"] }
    sizes = manifest["files"].values.map { |file| file["bytes"] - file["header_bytes"] }
    assert_equal 4, sizes.size
    assert_operator sizes.max, :<, 2 * sizes.sum / 4
    assert_equal [saved] * 3, world(3) { run_of(:units, :adam, 8, hidden: 40).then { |run| Checkpoint.load(dir, **run) && values(run) } }
  end

  # Several models and optimizers, sharded and not, in a state dict with a folder of its own.
  def test_several_models
    folder = File.join(@dir, "last")
    make = lambda do |seed, sharded|
      Torch.manual_seed(seed)
      nets = {"a" => Torch::NN::Linear.new(6, 5), :b => Torch::NN::Linear.new(3, 4)}
      FSDP.fully_shard(nets["a"]) if sharded
      optimizers = nets.values.map { |net| Torch::Optim::Adam.new(net.parameters, lr: 0.1) }
      {"nets" => nets, "optimizers" => optimizers, "n" => seed, "t" => Torch.full([2], seed)}
    end
    step = lambda do |state|
      state["optimizers"].each(&:zero_grad)
      state["nets"].each_value { |net| net.call(Torch.ones(2, net.in_features)).sum.backward }
      state["optimizers"].each(&:step)
    end
    whole = ->(net) { (FSDP.units_in(net).empty? ? net.state_dict : FSDP.full_state_dict(net)).values.map { |tensor| tensor.detach.to_a } }
    saved = world(3) do
      state = make.call(1, true)
      step.call(state)
      2.times { Checkpoint.save(state, checkpoint_id: folder) }
      state["nets"].values.map(&whole).tap { step.call(state) } << state["nets"].values.map(&whole)
    end.first
    assert_equal 3, Dir[File.join(folder, "data*")].size
    [[2, true], [1, false]].each do |ranks, sharded|
      loaded = world(ranks) do
        state = make.call(5, sharded)
        Checkpoint.load(state, checkpoint_id: folder)
        [state["n"], state["t"].to_a, state["nets"].values.map(&whole).tap { step.call(state) } << state["nets"].values.map(&whole)]
      end
      loaded.each { |each| assert_equal [1, [1, 1], saved], each }
    end
  end

  # The scheduler, the epoch and the random numbers as ever.
  def test_the_rest_of_a_run
    dir = @dir
    objects = lambda do
      run = run_of(:units, :adam, 1)
      run.merge(scheduler: Torch::Optim::LRScheduler::ExponentialLR.new(run[:optimizer], 0.5))
    end
    saved = world(2) do |rank|
      run = objects.call
      run[:scheduler].step
      Torch.manual_seed(rank)
      Checkpoint.save(dir, **run, epoch: 4, extra: {"rank" => rank}, keep: 1)
      Torch.rand(2).to_a
    end
    found = world(2) do
      run = objects.call
      loaded = Checkpoint.load(dir, **run)
      [loaded.epoch, loaded.extra, loaded.rng_restored, Torch.rand(2).to_a, run[:optimizer].param_groups[0][:lr]]
    end
    assert_equal([0, 1].map { |rank| [4, {"rank" => 0}, true, saved[rank], 0.005] }, found)
  end

  # Groups with options of their own, which the state keeps apart.
  def test_parameter_groups
    dir = @dir
    make = lambda do |strategy, seed|
      run = run_of(strategy, :adam, seed)
      biases, weights = run[:model].parameters.uniq(&:object_id).partition.with_index { |_, i| i.odd? }
      groups = [{params: weights, lr: 0.02}, {params: biases}]
      optimizer = if strategy == :zero
        Distributed::Optim::ZeroRedundancyOptimizer.new(groups, optimizer_class: Torch::Optim::Adam, lr: 0.005)
      else
        Torch::Optim::Adam.new(groups, lr: 0.005)
      end
      run.merge(optimizer: optimizer)
    end
    saved = world(3) do
      run = make.call(:zero, 1)
      train(run, 0...2)
      run[:optimizer].param_groups[1][:lr] = 0.125
      Checkpoint.save(dir, **run)
      [values(run)].tap { train(run, 2...4) } << values(run)
    end.first
    [[:units, 2], [:zero, 2], [:ddp, 1]].each do |strategy, size|
      world(size) do
        run = make.call(strategy, 5)
        Checkpoint.load(dir, **run)
        [run[:optimizer].param_groups.map { |group| group[:lr] }, values(run)].tap { train(run, 2...4) } << values(run)
      end.each do |rates, restored, went_on|
        assert_equal [0.02, 0.125], rates
        assert_equal saved[0], restored
        assert_close saved[1], went_on
      end
    end
  end
end
