# frozen_string_literal: true

require_relative "test_helper"
require "torch/distributed/fsdp"

# What tests of checkpoints of sharded models share.
module ShardedCheckpoints
  Checkpoint = Torch::Distributed::Checkpoint
  FSDP = Torch::Distributed::FSDP

  # Sizes that no number of ranks divides, so small that ranks have no element of some; a weight with two names, buffers.
  class Net < Torch::NN::Module
    def initialize(hidden: 17)
      super()
      @first = Torch::NN::Linear.new(5, hidden)
      @norm = Torch::NN::BatchNorm1d.new(5)
      @tied = Torch::NN::Linear.new(hidden, hidden, bias: false)
      @again = Torch::NN::Linear.new(hidden, hidden, bias: false)
      @again.instance_variable_set(:@weight, @tied.weight)
      @last = Torch::NN::Linear.new(hidden, 3)
    end

    def forward(x)
      x = @first.call(@norm.call(x)).tanh
      @last.call(@again.call(@tied.call(x).tanh))
    end
  end

  OPTIMIZERS = {
    adam: ->(parameters) { Torch::Optim::Adam.new(parameters, lr: 0.01) },
    momentum: ->(parameters) { Torch::Optim::SGD.new(parameters, lr: 0.05, momentum: 0.9) },
    fused: ->(parameters) { Torch::Optim::AdamW.new(parameters, lr: 0.01, fused: true) }
  }.freeze

  ZERO = {adam: [Torch::Optim::Adam, {lr: 0.01}], momentum: [Torch::Optim::SGD, {lr: 0.05, momentum: 0.9}],
          fused: [Torch::Optim::AdamW, {lr: 0.01, fused: true}]}.freeze

  # A model and its optimizer.
  #
  # @param strategy [Symbol] :units, one for each layer; :root, one for all; :wrapped; :zero; :ddp; :plain
  def run_of(strategy, kind, seed, hidden: 17)
    Torch.manual_seed(seed)
    net = Net.new(hidden: hidden)
    case strategy
    when :units then net.named_children.values_at("first", "norm", "last").each { |each| FSDP.fully_shard(each) } && FSDP.fully_shard(net)
    when :root then FSDP.fully_shard(net)
    when :wrapped then net = FSDP::FullyShardedDataParallel.new(net, auto_wrap_policy: FSDP::WrapPolicies.module_wrap_policy(Torch::NN::BatchNorm1d))
    when :zero, :ddp then net = Torch::NN::Parallel::DistributedDataParallel.new(net)
    end
    parameters = net.parameters.uniq(&:object_id)
    optimizer = if strategy == :zero
      optimizer_class, options = ZERO.fetch(kind)
      Torch::Distributed::Optim::ZeroRedundancyOptimizer.new(parameters, optimizer_class: optimizer_class, **options)
    else
      OPTIMIZERS.fetch(kind).call(parameters)
    end
    {model: net, optimizer: optimizer}
  end

  # The same data on all ranks, so that any number of them does the same.
  def train(run, steps)
    steps.each do |step|
      Torch.manual_seed(1000 + step)
      input = Torch.randn(6, 5)
      run[:optimizer].zero_grad
      (run[:model].call(input)**2).sum.backward
      run[:optimizer].step
    end
  end

  # The whole model, as numbers.
  def values(run)
    model = run[:model]
    model = model.module if model.is_a?(Torch::NN::Parallel::DistributedDataParallel)
    state = FSDP.units_in(model).empty? ? model.state_dict : FSDP.full_state_dict(model)
    state.transform_keys { |name| name.delete_prefix("module.") }.transform_values { |tensor| tensor.detach.reshape(-1).to_a }
  end

  def assert_close(expected, got, tolerance = 1e-6)
    assert_equal expected.keys, got.keys
    expected.each { |name, numbers| numbers.zip(got[name]) { |one, other| assert_in_delta one, other, tolerance, name } }
  end

  # In which forms a run goes on, by how many ranks; without a group in the plain one.
  RESUMED = {4 => [:units], 2 => [:root, :ddp], 3 => [:zero], 1 => [:wrapped]}.freeze

  # Saved by some ranks in one form, continued by others in all forms, beside the run that was not interrupted.
  #
  # @param cases [Array<Array(Integer, Symbol, Symbol)>] by how many ranks, in which form and by which optimizer it was saved
  def assert_goes_on_in_any_form(dir, cases)
    folder = ->(one) { File.join(dir, one.join("-")) }
    saved = cases.to_h do |one|
      size, strategy, kind = one
      said = world(size) do
        run = run_of(strategy, kind, 1)
        train(run, 0...3)
        Checkpoint.save(folder.call(one), **run, step: 3)
        [values(run)].tap { train(run, 3...6) } << values(run)
      end
      [one, said.first]
    end
    go_on = lambda do |forms|
      cases.product(forms).map do |one, form|
        run = run_of(form, one[2], 50)
        step = Checkpoint.load(folder.call(one), **run).step
        [one, step, values(run)].tap { train(run, 3...6) } << values(run)
      end
    end
    said = RESUMED.flat_map { |ranks, forms| world(ranks) { go_on.call(forms) }.flatten(1) } + Torch::Distributed.fork_world(1) { go_on.call([:plain]) }.first
    assert_equal cases.size * (RESUMED.sum { |ranks, forms| ranks * forms.size } + 1), said.size
    said.each do |one, step, restored, went_on|
      assert_equal 3, step
      assert_equal saved[one][0], restored
      assert_close saved[one][1], went_on
    end
  end
end
