# frozen_string_literal: true

require_relative "sharded_training"

# What models do beside running each of their units once.
class FsdpModelsTest < Minitest::Test
  include ShardedTraining

  # Trains a model and its sharded twin, and compares.
  def follows(size, steps: 8, optimizer: ->(parameters) { Torch::Optim::Adam.new(parameters, lr: 0.01, weight_decay: 0.1) })
    found = world(size) do |rank|
      plain, model = make { yield }, make { yield }
      follow(plain, model.shard, rank, size, steps: steps, optimizer: optimizer)
    end
    assert_operator found.max, :<, 1e-10
  end

  # Blocks that its forward uses as it likes.
  class Custom < Torch::NN::Module
    attr_reader :blocks

    def initialize(count: 3, frozen: [], tied: false, &forward)
      super()
      @first = Torch::NN::Linear.new(5, 4)
      @blocks = Torch::NN::ModuleList.new(Array.new(count) { Torch::NN::Linear.new(4, 4) })
      @last = Torch::NN::Linear.new(4, 3)
      frozen.each { |index| @blocks[index].parameters.each { |parameter| parameter.requires_grad!(false) } }
      @tied = tied
      @forward = forward
    end

    def tie
      @blocks.to_a.last.instance_variable_set(:@weight, @blocks[0].weight) if @tied
    end

    def forward(x)
      @last.call(@forward.call(self, @first.call(x).tanh))
    end

    def shard
      @blocks.each { |block| ShardedTraining::FSDP.fully_shard(block) }
      ShardedTraining::FSDP.fully_shard(self)
    end
  end

  def chain(x, *blocks)
    blocks.reduce(x) { |hidden, block| block.call(hidden).tanh }
  end

  [1, 2, 3].each do |size|
    define_method(:"test_units_used_twice_on_#{size}_ranks") do
      follows(size) { Custom.new { |model, x| chain(x, *model.blocks, model.blocks[0], model.blocks[2]) } }
    end

    define_method(:"test_units_that_are_not_used_on_#{size}_ranks") do
      follows(size) { Custom.new { |model, x| chain(x, model.blocks[1]) } }
    end

    define_method(:"test_outputs_that_are_not_used_on_#{size}_ranks") do
      follows(size) { Custom.new { |model, x| model.blocks[0].call(x).then { chain(x, model.blocks[1], model.blocks[2]) } } }
    end

    define_method(:"test_frozen_parameters_on_#{size}_ranks") do
      follows(size) { Custom.new(frozen: [0, 2]) { |model, x| chain(x, *model.blocks) } }
    end

    define_method(:"test_a_parameter_of_two_units_on_#{size}_ranks") do
      follows(size) { Custom.new(tied: true) { |model, x| chain(x, *model.blocks) } }
    end

    define_method(:"test_branches_on_#{size}_ranks") do
      follows(size) { Custom.new { |model, x| model.blocks[0].call(x) + model.blocks[1].call(x) * model.blocks[2].call(x).tanh } }
    end

    define_method(:"test_segments_that_are_computed_again_on_#{size}_ranks") do
      checkpoint = Torch::Utils::Checkpoint.method(:checkpoint)
      follows(size) { Custom.new { |model, x| checkpoint.call(model.blocks[1], chain(x, model.blocks[0])).then { |y| chain(y, model.blocks[2]) } } }
      follows(size) { Custom.new { |model, x| checkpoint.call(x) { |y| chain(y, *model.blocks) } } }
    end
  end

  # Some of a unit's parameters train, and the inputs need no gradient: what is frozen may be read late.
  def test_units_that_are_frozen_in_part
    follows(2) do
      Custom.new { |model, x| chain(x, *model.blocks) }.tap do |made|
        made.instance_variable_get(:@first).bias.requires_grad!(false)
        made.blocks.each { |block| block.weight.requires_grad!(false) }
      end
    end
  end

  # One of two layers.
  class Choice < Torch::NN::Module
    attr_reader :either, :other, :neither

    def initialize
      super
      @either, @other, @neither = Array.new(3) { Torch::NN::Linear.new(5, 3) }
    end

    def forward(x, choice)
      (choice ? @either : @other).call(x)
    end
  end

  # Parameters that one rank alone uses have a mean over all; those that none uses have no gradient.
  def test_parameters_that_some_ranks_use
    x, = batch(0, 1)
    found = world(3) do |rank|
      model = FSDP.fully_shard(make { Choice.new })
      2.times { model.call(x, rank == 1).sum.backward }
      plain = make { Choice.new }
      [true, false].each { |choice| plain.call(x, choice).sum.backward }
      [model, plain].map { |of| of.named_parameters.transform_values { |parameter| parameter.grad&.flatten&.to_a } }
    end
    grads = found.map(&:first)
    found[0][1].each do |name, full|
      next assert_equal([nil] * 3, grads.map { |of| of[name] }, name) if full.nil?

      users = name.start_with?("either") ? 1 : 2
      full.zip(grads.flat_map { |of| of[name] }) { |expected, actual| assert_in_delta 2 * expected * users / 3, actual, 1e-12, name }
    end
  end

  # Units are gathered by all ranks, in one order.
  def test_ranks_that_run_other_units
    found = world(2) do |rank|
      model = make { Custom.new { |mod, x| chain(x, mod.blocks[rank]) } }.shard
      failure { model.call(batch(0, 1)[0]) }
    end
    found.each do |name, text|
      assert_equal "Torch::Distributed::MismatchError", name
      assert_equal ["Linear (unit 0)", "Linear (unit 1)"], text.scan(/Linear \(unit \d+\)/).sort
    end
  end

  # --- several forwards, several backwards ---

  def accumulated(size)
    found = world(size) do |rank|
      plain, model = tower, shard(tower)
      optimizers = [plain, model].map { |of| Torch::Optim::Adam.new(of.parameters, lr: 0.01) }
      4.times do |step|
        optimizers.each(&:zero_grad)
        parts = Array.new(3) { |part| batch(10 * step + part, size) }
        parts.each { |x, y| loss(plain.call(x), y).backward }
        yield model, parts.map { |x, y| [mine(x, rank, size), mine(y, rank, size)] }
        optimizers.each(&:step)
      end
      difference(plain, FSDP.full_state_dict(model))
    end
    assert_operator found.max, :<, 1e-10
  end

  def test_gradients_are_added_up
    accumulated(2) { |model, parts| parts.each { |x, y| loss(model.call(x), y).backward } }
  end

  def test_gradients_are_added_up_without_communication
    accumulated(3) do |model, parts|
      model.set_requires_gradient_sync(false)
      parts.first(2).each { |x, y| loss(model.call(x), y).backward }
      model.set_requires_gradient_sync(true)
      loss(model.call(parts[2][0]), parts[2][1]).backward
    end
  end

  def test_one_backward_of_several_forwards
    accumulated(2) { |model, parts| parts.map { |x, y| loss(model.call(x), y) }.inject(:+).backward }
  end

  def test_backwards_after_all_forwards
    accumulated(2) { |model, parts| parts.map { |x, y| loss(model.call(x), y) }.reverse_each(&:backward) }
  end

  def test_a_backward_that_is_repeated
    accumulated(2) do |model, parts|
      sum = parts.map { |x, y| loss(model.call(x), y) }.inject(:+)
      (sum / 4).backward(retain_graph: true)
      (sum * 3 / 4).backward
    end
  end

  def test_evaluation_between_steps
    found = world(2) do |rank|
      plain, model = tower, shard(tower)
      optimizers = [plain, model].map { |of| Torch::Optim::SGD.new(of.parameters, lr: 0.1) }
      outputs = 3.times.map do |step|
        x, y = batch(step, 2)
        optimizers.each(&:zero_grad)
        loss(plain.call(x), y).backward
        loss(model.call(mine(x, rank, 2)), mine(y, rank, 2)).backward
        evaluate = -> { [plain, model].map { |of| Torch.no_grad { of.call(x) } }.then { |one, other| (one - other).abs.max.item } }
        before = evaluate.call
        optimizers.each(&:step)
        [before, evaluate.call]
      end
      outputs.flatten.max
    end
    assert_operator found.max, :<, 1e-12
  end

  # A forward with grad whose backward never comes, between others.
  def test_a_forward_that_is_left_alone
    accumulated(2) do |model, parts|
      model.call(parts[1][0])
      parts.each { |x, y| loss(model.call(x), y).backward }
    end
  end

  def test_inputs_that_are_leaves_with_a_gradient
    found = world(2) do |rank|
      plain, model = tower, shard(tower)
      x, y = batch(0, 2)
      inputs = [x, mine(x, rank, 2)].map { |tensor| tensor.clone.requires_grad! }
      2.times do
        loss(plain.call(inputs[0]), y).backward
        loss(model.call(inputs[1]), mine(y, rank, 2)).backward
      end
      # The loss is a mean over half of the rows.
      (mine(inputs[0].grad, rank, 2) * 2 - inputs[1].grad).abs.max.item
    end
    assert_operator found.max, :<, 1e-12
  end

  # --- freezing ---

  def test_parameters_that_are_frozen_and_thawed_later
    found = world(2) do |rank|
      plain, model = tower, shard(tower)
      optimizers = [plain, model].map { |of| Torch::Optim::SGD.new(of.parameters, lr: 0.1) }
      6.times do |step|
        [plain, model].each { |of| of.layers[1].parameters.each { |parameter| parameter.requires_grad!(step.even?) } }
        [plain, model].each { |of| of.head.bias.requires_grad!(step >= 3) }
        x, y = batch(step, 2)
        optimizers.each(&:zero_grad)
        loss(plain.call(x), y).backward
        loss(model.call(mine(x, rank, 2)), mine(y, rank, 2)).backward
        optimizers.each(&:step)
      end
      difference(plain, FSDP.full_state_dict(model))
    end
    assert_operator found.max, :<, 1e-12
  end
end
