# frozen_string_literal: true

require_relative "test_helper"
require "open3"
require "rbconfig"
require "torch_bridge"

# TorchBridge's names, as its programs write them.
class TorchBridgeTest < Minitest::Test
  # Layers in a list, as a GPT has them.
  class Net < Torch::NN::Module
    def initialize
      super
      @layers = Torch::NN::ModuleList.new(Array.new(3) { Torch::NN::Linear.new(4, 4) })
      @head = Torch::NN::Linear.new(4, 1)
    end

    def forward(x)
      @layers.each { |layer| x = Torch.tanh(layer.call(x)) }
      @head.call(x)
    end
  end

  INPUTS = [[0.1, -0.2, 0.3, 0.5], [1.0, 0.4, -0.6, 0.2], [-0.3, 0.8, 0.1, -0.9], [0.6, -0.5, 0.2, 0.7]].freeze

  def self.train(model, rows)
    optimizer = Torch::Optim::SGD.new(model.parameters, lr: 0.1)
    Array.new(3) do
      optimizer.zero_grad
      loss = model.call(Torch.tensor(INPUTS.values_at(*rows))).pow(2).mean
      loss.backward
      optimizer.step
      loss.item
    end
  end

  def self.net
    Torch.manual_seed(3)
    Net.new
  end

  STRATEGIES = {
    "FULL_SHARD" => {}, "SHARD_GRAD_OP" => {}, "NO_SHARD" => {}, "HYBRID_SHARD" => {}, :full_shard => {activation_checkpointing: true},
    "full_shard" => {cpu_offload: true}
  }.freeze

  # Each rank trains the undivided model beside it.
  def test_strategies_train_as_one_process
    losses = Torch::Distributed.fork_world(2) do |rank, _|
      Torch::Distributed.init_process_group("gloo", rank: rank, world_size: 2)
      expected = TorchBridgeTest.train(TorchBridgeTest.net, [0, 1, 2, 3])
      found = STRATEGIES.map do |strategy, switches|
        model = AdvancedFSDPManager.new(sharding_strategy: strategy, **switches).wrap_model(TorchBridgeTest.net)
        TorchBridgeTest.train(model, [2 * rank, 2 * rank + 1])
      end
      [expected, found]
    end
    expected = losses.first.first
    losses.map(&:last).transpose.zip(STRATEGIES.keys) do |(one, other), strategy|
      one.zip(other, expected) { |a, b, all| assert_in_delta all, (a + b) / 2, 1e-6, strategy.to_s }
    end
  end

  def test_mixed_precision_and_layers_as_units
    types = Torch::Distributed.fork_world(1) do
      Torch::Distributed.init_process_group("gloo", store: Torch::Distributed::HashStore.new, rank: 0, world_size: 1)
      model = AdvancedFSDPManager.new(sharding_strategy: "FULL_SHARD", mixed_precision: true, cpu_offload: false,
        activation_checkpointing: true).wrap_model(TorchBridgeTest.net)
      units = model.module.modules.to_a.count { |each| each.is_a?(Torch::Distributed::FSDP::FSDPModule) }
      [model.call(Torch.tensor(INPUTS)).dtype, units]
    end
    assert_equal [[:bfloat16, 4]], types
  end

  def test_mistakes_before_anyone_waits
    error = assert_raises(ArgumentError) { AdvancedFSDPManager.new(sharding_strategy: "HALF_SHARD") }
    assert_equal "sharding_strategy: expected one of [\"FULL_SHARD\", \"SHARD_GRAD_OP\", \"NO_SHARD\", \"HYBRID_SHARD\"], got \"HALF_SHARD\"",
      error.message
    assert_raises(ArgumentError) { AdvancedFSDPManager.new(mixed_precision: "bf16") }
    assert_raises(ArgumentError) { AdvancedFSDPManager.new(cpu_offload: nil) }
    assert_raises(TypeError) { AdvancedFSDPManager.new.wrap_model(1) }
    assert_raises(Torch::Distributed::GroupError) { AdvancedFSDPManager.new.wrap_model(self.class.net) }
  end

  def test_names
    assert_same TorchBridge::ColumnParallelLinear, ::ColumnParallelLinear
    assert_same Torch::Distributed::Tensor::Parallel::RowParallelLinear, ::RowParallelLinear
    assert_same Torch::Distributed::Pipelining::PipelineStage, ::PipelineStage
    assert_equal :hybrid_shard, ShardingStrategy::HYBRID_SHARD
    checkpointing = SelectiveGradientCheckpointing.new(self.class.net, checkpoint_ratio: 0.5)
    assert_equal %w[layers.0 layers.2], checkpointing.checkpointed_layers.keys
  end

  # An MLP of a layer that is divided by columns and one by rows.
  def test_parallel_layers
    outputs = Torch::Distributed.fork_world(2) do |rank, _|
      Torch::Distributed.init_process_group("gloo", rank: rank, world_size: 2)
      Torch.manual_seed(1)
      up, down = ColumnParallelLinear.new(4, 6), RowParallelLinear.new(6, 4)
      down.call(Torch.tanh(up.call(Torch.tensor(INPUTS)))).to_a
    end
    Torch.manual_seed(1)
    up, down = Torch::NN::Linear.new(4, 6), Torch::NN::Linear.new(6, 4)
    expected = down.call(Torch.tanh(up.call(Torch.tensor(INPUTS)))).to_a.flatten
    outputs.each { |output| output.flatten.zip(expected) { |got, value| assert_in_delta value, got, 1e-5 } }
  end

  def run_script(code, *launcher)
    lib = File.expand_path("../../lib", __dir__)
    Open3.capture3({"RUBYLIB" => lib}, RbConfig.ruby, "-e", code, *launcher)
  end

  def test_one_call_sets_up_a_process
    contexts = Torch::Distributed.fork_world(2) do |rank, _|
      manager = MultiNodeTrainingManager.new
      wrong = begin
        manager.setup(num_nodes: 3, device: "cpu")
      rescue Torch::Error, ArgumentError => e
        e.message
      end
      context = manager.setup(num_nodes: 1, device: "cpu")
      sum = Torch::Distributed.all_reduce(Torch.tensor([rank + 1.0])).item
      second = begin
        manager.setup
      rescue Torch::Distributed::GroupError => e
        e.message
      end
      manager.cleanup
      [context.rank, context.local_rank, context.world_size, context.device.type, sum, Torch::Distributed.initialized?, wrong, second]
    end
    contexts.each_with_index do |(*place, wrong, second), rank|
      assert_equal [rank, rank, 2, "cpu", 3.0, false], place
      assert_match(/nodes: 3/, wrong)
      assert_match(/setup makes the default process group, but there is one already/, second)
    end
  end

  def test_without_a_launcher_it_prints_the_commands
    out, err, status = run_script('require "torch_bridge"; MultiNodeTrainingManager.new.setup(num_nodes: 2, gpus_per_node: 8); puts "never"')
    assert_equal 2, status.exitstatus, err
    commands = out.lines.grep(/torchrun/)
    assert_equal 2, commands.size, out
    assert_match(/--nnodes=2 --node-rank=1 --nproc-per-node=8 /, commands.last)
    refute_match(/never/, out)
    assert_match(/no launcher started this process/, err)
  end
end
