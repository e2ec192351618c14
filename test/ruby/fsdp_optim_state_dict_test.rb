# frozen_string_literal: true

require_relative "sharded_checkpoints"

# The whole state of a sharded model's optimizer.
class FSDPOptimStateDictTest < Minitest::Test
  include ShardedCheckpoints

  def plain(value)
    case value
    when Torch::Tensor then [value.dtype, value.shape, value.detach.reshape(-1).to_a]
    when Hash then value.transform_values { |each| plain(each) }
    when Array then value.map { |each| plain(each) }
    else value
    end
  end

  def assert_states(expected, got)
    assert_equal expected["param_groups"], got["param_groups"]
    assert_equal expected["state"].keys, got["state"].keys
    expected["state"].each do |number, kept|
      assert_equal kept.keys, got["state"][number].keys
      kept.each do |key, value|
        next assert_equal(value, got["state"][number][key]) unless value.is_a?(Array)

        assert_equal value.first(2), got["state"][number][key].first(2)
        value.last.zip(got["state"][number][key].last) { |one, other| assert_in_delta one, other, 1e-6 }
      end
    end
  end

  def alone(kind, steps, after)
    Distributed.fork_world(1) do
      run = run_of(:plain, kind, 1)
      train(run, 0...steps)
      state = plain(run[:optimizer].state_dict)
      train(run, steps...after)
      [state, values(run)]
    end.first
  end

  [[:units, :adam, 4], [:root, :momentum, 3], [:wrapped, :fused, 2], [:units, :adam, 1]].each do |strategy, kind, size|
    define_method(:"test_the_state_of_#{size}_with_#{strategy}_is_the_plain_one") do
      expected, after = alone(kind, 2, 4)
      said = world(size) do |rank|
        run = run_of(strategy, kind, 1)
        train(run, 0...2)
        states = [true, false].map { |rank0_only| FSDP.full_optim_state_dict(run[:model], run[:optimizer], rank0_only: rank0_only) }
        model = FSDP.full_state_dict(run[:model]).transform_keys { |name| name.delete_prefix("module.") }
        other = run_of(:root, kind, 9)
        FSDP.load_full_state_dict(other[:model], model)
        FSDP.load_full_optim_state_dict(other[:model], other[:optimizer], states.last)
        train(other, 2...4)
        went_on = values(other)
        # In one process, without a group.
        single = run_of(:plain, kind, 7)
        single[:model].load_state_dict(model)
        single[:optimizer].load_state_dict(states.last)
        train(single, 2...4)
        [states.map { |state| plain(state) }, went_on, values(single)]
      end
      said.each_with_index do |((first, all), went_on, single), rank|
        rank.zero? ? assert_states(expected, first) : assert_empty(first)
        assert_states(expected, all)
        assert_close after, went_on
        assert_close after, single
      end
    end
  end

  def test_what_is_refused
    said = world(2) do |rank|
      run = run_of(:units, :adam, 1, hidden: 40)
      other = run_of(:plain, :adam, 2)
      train(run, 0...1)
      full = FSDP.full_optim_state_dict(run[:model], run[:optimizer], rank0_only: false)
      wrong = full.merge("state" => full["state"].merge(0 => full["state"][0].merge("exp_avg" => Torch.zeros(3))))
      errors = [
        failure { FSDP.full_optim_state_dict(run[:model], other[:optimizer]) },
        failure { FSDP.full_optim_state_dict(other[:model], run[:optimizer]) },
        failure { FSDP.full_optim_state_dict(run[:model], 5) },
        failure { FSDP.load_full_optim_state_dict(run[:model], run[:optimizer], {}) },
        failure { FSDP.load_full_optim_state_dict(run[:model], run[:optimizer], wrong) }
      ]
      run[:optimizer].step if rank == 1
      errors << failure { FSDP.full_optim_state_dict(run[:model], run[:optimizer]) }
    end
    texts = [
      /optimizer: expected the parameters of this .*Net, got one with others/, /this .*Net is not sharded/,
      /optimizer: expected a Torch::Optim::Optimizer, got 5/, /expected an optimizer's state, got a Hash of /,
      /exp_avg of model.first.weight has the shape \[3\], expected \[40, 5\]/,
      /full_optim_state_dict: the state of .* has step: 1 on global rank 0, but step: 2 on global rank 1: expected the same steps/
    ]
    said.each { |errors| errors.zip(texts) { |error, text| assert_match text, error&.last.to_s } }
    assert_equal said[0], said[1]
  end

  # Replicas of shards: rank 0's group has it.
  def test_replicas
    expected, = alone(:adam, 1, 1)
    said = world(4) do
      Torch.manual_seed(1)
      net = FSDP.fully_shard(Net.new, mesh: Distributed.init_device_mesh("cpu", [2, 2]))
      run = {model: net, optimizer: OPTIMIZERS[:adam].call(net.parameters.uniq(&:object_id))}
      train(run, 0...1)
      [true, false].map { |rank0_only| plain(FSDP.full_optim_state_dict(net, run[:optimizer], rank0_only: rank0_only)) }
    end
    said.each_with_index do |(first, all), rank|
      rank.zero? ? assert_states(expected, first) : assert_empty(first)
      assert_states(expected, all)
    end
  end

  # The model's own unit has no parameter, all are in those of its layers.
  def test_a_unit_without_parameters
    dir = Dir.mktmpdir
    said = world(2) do
      Torch.manual_seed(1)
      net = Torch::NN::Sequential.new(Torch::NN::Linear.new(40, 3), Torch::NN::Linear.new(3, 2))
      net.children.each { |layer| FSDP.fully_shard(layer) }
      FSDP.fully_shard(net)
      optimizer = Torch::Optim::Adam.new(net.parameters, lr: 0.1)
      net.call(Torch.ones(1, 40)).sum.backward
      optimizer.step
      state = FSDP.full_optim_state_dict(net, optimizer, rank0_only: false)
      Checkpoint.save(dir, model: net, optimizer: optimizer)
      Checkpoint.load(dir, model: net, optimizer: optimizer)
      Checkpoint::Safetensors.save_model(net, File.join(dir, "exported"))
      [state["state"].keys, state["state"][0]["exp_avg"].shape, state["state"][2]["exp_avg"].numel, FSDP.full_state_dict(net)["0.weight"].to_a]
    end
    exported = Checkpoint::Safetensors.load(File.join(dir, "exported"))["0.weight"].to_a
    assert_equal [[[0, 1, 2, 3], [3, 40], 6, exported]] * 2, said
  ensure
    FileUtils.rm_rf(dir)
  end
end
