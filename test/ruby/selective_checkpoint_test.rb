# frozen_string_literal: true

require_relative "test_helper"

# Chains of checkpointed segments, and models some of whose layers are checkpointed.
class SelectiveCheckpointTest < Minitest::Test
  DDP = Torch::NN::Parallel::DistributedDataParallel
  Checkpoint = Torch::Utils::Checkpoint
  Selective = Torch::Utils::Checkpoint::SelectiveCheckpointing

  # Counts its forwards.
  class Block < Torch::NN::Module
    attr_accessor :runs

    def initialize
      super
      @runs = 0
      @inner = Torch::NN::Linear.new(4, 4)
      @drop = Torch::NN::Dropout.new(p: 0.5)
    end

    def forward(x, scale: 1)
      @runs += 1
      @drop.call(@inner.call(x).tanh * scale) + x
    end
  end

  class Net < Torch::NN::Module
    def initialize(blocks)
      super()
      @head = Torch::NN::Sequential.new(Torch::NN::Linear.new(4, 4), Torch::NN::Tanh.new)
      @blocks = Torch::NN::ModuleList.new(Array.new(blocks) { Block.new })
      @norm = Torch::NN::BatchNorm1d.new(4)
    end

    def forward(x)
      @norm.call(@blocks.inject(@head.call(x)) { |hidden, block| block.call(hidden, scale: 2) })
    end
  end

  def net(blocks)
    Torch.manual_seed(3)
    Net.new(blocks)
  end

  def runs(net)
    net.blocks.map(&:runs)
  end

  # One step's outputs and gradients.
  def trained(model)
    Torch.manual_seed(9)
    model.zero_grad
    output = model.call(Torch.randn(6, 4))
    output.pow(2).sum.backward
    [output.to_a, model.parameters.map { |parameter| parameter.grad.to_a }, Torch.rand(2).to_a]
  end

  # In a process of its own, where backward may run.
  def aside
    Distributed.fork_world(1) { yield && nil }
  end

  # --- checkpoint_sequential ---

  def chain
    Torch.manual_seed(3)
    Array.new(7) { Block.new }
  end

  def gradients(blocks)
    Torch.manual_seed(5)
    input = Torch.randn(3, 4, requires_grad: true)
    yield(blocks, input).pow(2).sum.backward
    [input.grad.to_a, *blocks.flat_map(&:parameters).map { |parameter| parameter.grad.to_a }]
  end

  def test_a_chain_in_segments
    aside do
      expected = gradients(chain) { |blocks, input| blocks.inject(input) { |x, block| block.call(x) } }
      {1 => 0, 2 => 3, 3 => 4, 4 => 3, 7 => 6}.each do |segments, again|
        blocks = chain
        found = gradients(blocks) { |list, input| Checkpoint.checkpoint_sequential(list, segments, input) }
        assert_equal expected, found, "#{segments} segments"
        assert_equal [2] * again + [1] * (7 - again), blocks.map(&:runs)
      end
      blocks = chain
      assert_equal expected, gradients(blocks) { |list, input| Checkpoint.checkpoint_sequential(Torch::NN::Sequential.new(*list), 2, input) }
      refute_equal expected, gradients(chain) { |list, input| Checkpoint.checkpoint_sequential(list, 2, input, preserve_rng_state: false) }
    end
  end

  def test_chains_of_other_things
    double = ->(x) { x * 2 }
    assert_equal 16.0, Torch.no_grad { Checkpoint.checkpoint_sequential([double] * 4, 3, Torch.tensor(1.0)).item }
    {0 => "from 1 to 2", 3 => "from 1 to 2", nil => "got nil", 1.5 => "got 1.5"}.each do |segments, text|
      assert_includes assert_raises(ArgumentError) { Checkpoint.checkpoint_sequential([double, double], segments, 1) }.message, text
    end
    assert_match(/at least one/, assert_raises(ArgumentError) { Checkpoint.checkpoint_sequential([], 1, 1) }.message)
    assert_match(/`call`, got 7 at 1/, assert_raises(ArgumentError) { Checkpoint.checkpoint_sequential([double, 7], 1, 1) }.message)
    assert_match(/functions: .*got 7/, assert_raises(ArgumentError) { Checkpoint.checkpoint_sequential(7, 1, 1) }.message)
  end

  # --- SelectiveCheckpointing ---

  def test_gradients_are_those_of_the_plain_model
    aside do
      expected = trained(net(5))
      {0 => 0, 0.2 => 1, 0.5 => 3, 1 => 5}.each do |ratio, layers|
        plain = net(5)
        model = Selective.new(plain, ratio: ratio)
        assert_equal expected, trained(model), "ratio #{ratio}"
        assert_equal layers, runs(plain).count(2)
        assert_equal 5 - layers, runs(plain).count(1)
        assert_equal model.checkpointed_layers.values, plain.blocks.select { |block| block.runs == 2 }
      end
      refute_equal expected, trained(Selective.new(net(5), preserve_rng_state: false))
    end
  end

  def test_layers_are_spread_evenly
    chosen = lambda do |layers, ratio|
      Selective.new(net(layers), checkpoint_ratio: ratio).checkpointed_layers.keys.map { |name| Integer(name.delete_prefix("blocks.")) }
    end
    assert_equal [0, 2, 4, 6], chosen.call(8, 0.5)
    assert_equal [0, 4], chosen.call(8, 0.25)
    assert_equal [0, 2, 3, 4, 6, 7], chosen.call(8, 0.75)
    assert_equal [0, 3], chosen.call(5, 0.4)
    assert_equal (0..4).to_a, chosen.call(5, 1)
    assert_equal [], chosen.call(5, 0.0)
    (2..9).each { |layers| (0..layers).each { |k| assert_equal k, chosen.call(layers, k / layers.to_f).size } }
  end

  def chain_of_linear(count, width)
    layers = Array.new(count) { Torch::NN::Linear.new(width, width) }
    Torch::NN::Sequential.new(*layers)
  end

  # Blocks with lists of their own, between layers in a list.
  def test_the_list_of_layers_is_found
    block = -> { chain_of_linear(5, 4) }
    blocks = Torch::NN::ModuleList.new([block.call, block.call])
    small = chain_of_linear(9, 1)
    model = Torch::NN::Module.new
    model.add_module("small", small)
    model.add_module("blocks", blocks)
    assert_equal %w[blocks.0 blocks.1], Selective.new(model, ratio: 1).checkpointed_layers.keys
    middle = Torch::NN::Sequential.new(block.call, block.call, block.call, block.call)
    long = Torch::NN::Sequential.new(Torch::NN::Linear.new(4, 4), middle, Torch::NN::Linear.new(4, 1))
    assert_equal %w[1.0 1.2], Selective.new(long).checkpointed_layers.keys
    shared = Torch::NN::Linear.new(4, 4)
    assert_equal %w[0], Selective.new(Torch::NN::Sequential.new(shared, shared), ratio: 1).checkpointed_layers.keys
  end

  def test_names_and_state_are_the_models
    plain = net(3)
    model = Selective.new(plain, ratio: 1.0)
    assert_equal net(3).state_dict.keys, model.state_dict.keys
    assert_equal plain.named_parameters.keys, model.named_parameters.keys
    assert_equal plain.parameters.map(&:object_id), model.parameters.map(&:object_id)
    assert_equal plain.named_modules.keys, model.named_modules.keys
    assert_equal plain.named_buffers.keys, model.named_buffers.keys
    assert_same plain, model.model
    assert_equal plain.blocks.to_a, model.blocks.to_a
    assert_respond_to model, :blocks
    assert_raises(NoMethodError) { model.nonsense }
    Torch.manual_seed(77)
    other = Net.new(3).state_dict
    model.load_state_dict(other)
    assert_equal other.transform_values(&:to_a), plain.state_dict.transform_values(&:to_a)
    assert_same model, model.double
    assert_equal [:float64], plain.parameters.map(&:dtype).uniq
    met = []
    assert_same model, model.apply(->(each) { met << each })
    assert_same plain, met.last
    assert_equal [Block] * 3, plain.blocks.map(&:class)
  end

  def test_only_in_training_and_with_grad
    aside do
      plain = net(2)
      model = Selective.new(plain, ratio: 1)
      assert_same model, model.eval
      refute plain.blocks[0].training
      model.call(Torch.randn(3, 4)).sum.backward
      assert_equal [1, 1], runs(plain)
      model.train
      Torch.no_grad { model.call(Torch.randn(3, 4)) }
      assert_equal [2, 2], runs(plain)
      model.call(Torch.randn(3, 4)).pow(3).sum.backward
      assert_equal [4, 4], runs(plain)
      plain.call(Torch.randn(3, 4)).pow(3).sum.backward # the same layers
      assert_equal [6, 6], runs(plain)
    end
  end

  def test_it_can_be_undone
    aside do
      plain = net(2)
      model = Selective.new(plain, ratio: 1)
      assert_predicate model, :enabled?
      error = assert_raises(ArgumentError) { Selective.new(plain, ratio: 1) }
      assert_includes error.message, "blocks.0 is checkpointed by another"
      assert_same model, model.enable
      model.disable
      refute_predicate model, :enabled?
      expected = trained(net(2))
      assert_equal expected, trained(model)
      assert_equal [1, 1], runs(plain)
      second = Selective.new(plain) { |name, _| name == "blocks.1" }
      assert_raises(ArgumentError) { model.enable }
      refute_predicate model, :enabled?
      model.remove # the second one's stay
      assert_predicate second, :enabled?
      trained(plain)
      assert_equal [2, 3], runs(plain)
      refute_predicate Selective.new(plain.deep_dup, ratio: 1).disable, :enabled?
    end
  end

  def test_a_policy_and_given_layers
    aside do
      expected = trained(net(3))
      asked = []
      plain = net(3)
      model = Selective.new(plain) { |name, layer| (asked << name) && layer.is_a?(Block) && name != "blocks.1" }
      assert_equal %w[blocks.0 blocks.2], model.checkpointed_layers.keys
      assert_equal expected, trained(model)
      assert_equal [2, 1, 2], runs(plain)
      assert_includes asked, "blocks.1.inner"
      refute_includes asked, "blocks.0.inner" # within one that is
      refute_includes asked, "blocks"         # a list
      refute_includes asked, ""
      plain = net(3)
      assert_equal ["head"], Selective.new(plain, policy: ->(name, _) { name == "head" }).checkpointed_layers.keys
      assert_equal %w[head norm], Selective.new(plain = net(3), layers: [plain.head, plain.norm], ratio: 1).checkpointed_layers.keys
      assert_equal ["0"], Selective.new(Torch::NN::Sequential.new(Torch::NN::Linear.new(4, 4), Torch::NN::Tanh.new)).checkpointed_layers.keys
    end
  end

  def test_arguments_that_make_no_sense
    text = ->(model, **options, &block) { assert_raises(ArgumentError) { Selective.new(model, **options, &block) }.message }
    [-0.1, 1.1, "half", Float::NAN, Complex(1, 1)].each { |ratio| assert_includes text.call(net(2), ratio: ratio), "ratio: expected a number from 0 to 1" }
    assert_includes text.call(Torch::NN::Linear.new(2, 2)), "no ModuleList and no Sequential"
    assert_includes(text.call(net(1)) { false }, "chose none of the model's modules: head, head.0")
    assert_includes text.call(net(1), policy: 3), "policy: expected"
    assert_includes text.call(net(1), layers: [Block.new]), "is no module within the model"
    assert_includes text.call(net(1), layers: []), "layers: expected"
    assert_includes text.call(net(1), ratio: 0.5, checkpoint_ratio: 0.5), "ratio or checkpoint_ratio, got both"
    assert_includes(text.call(net(1), ratio: 0.5) { true }, "block or ratio, got both")
    assert_includes text.call(5), "expected a Torch::NN::Module, got 5"
  end

  def test_under_data_parallel
    results = world(2) do |rank|
      [0, 0.5, 1].map do |ratio|
        plain = net(4)
        model = DDP.new(Selective.new(plain, ratio: ratio))
        Torch.manual_seed(20 + rank)
        3.times do
          plain.zero_grad
          model.call(Torch.randn(5, 4)).pow(2).mean.backward
          Torch.no_grad { plain.parameters.each { |parameter| parameter.sub!(parameter.grad * 0.1) } }
        end
        [plain.parameters.map(&:to_a), runs(plain)]
      end
    end
    parameters = results.flat_map { |result| result.map(&:first) }
    assert_equal 1, parameters.uniq.size
    assert_equal [[3, 3, 3, 3], [6, 3, 6, 3], [6, 6, 6, 6]], results[0].map(&:last)
  end
end
