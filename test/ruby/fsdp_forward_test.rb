# frozen_string_literal: true

require_relative "sharded_training"

# What passes through a unit: outputs of any class, and methods that call forward themselves.
class FsdpForwardTest < Minitest::Test
  include ShardedTraining

  # As transformers-rb's models return them.
  class Output
    attr_reader :data

    def initialize(**data)
      @data = data
    end
  end

  Pair = Struct.new(:first, :second)

  KINDS = {
    object: [->(x) { Output.new(hidden: x, text: "x") }, ->(output) { output.data[:hidden] }],
    nested: [->(x) { {"list" => [Pair.new(Output.new(inner: [x]), 1)]} }, ->(output) { output["list"][0].first.data[:inner][0] }],
    set: [->(x) { Set[x] }, ->(output) { output.first }],
    round: [->(x) { Output.new(hidden: x).tap { |made| made.data[:self] = made } }, ->(output) { output.data[:self].data[:hidden] }]
  }.freeze

  # Layers pass on what `wrap` makes of their tensor.
  class Chain < Torch::NN::Module
    attr_reader :layers, :head

    def initialize(wrap, unwrap, checkpointed: false)
      super()
      @checkpointed = checkpointed
      @layers = Torch::NN::ModuleList.new(Array.new(3) { Layer.new(wrap, unwrap) })
      @head = Torch::NN::Linear.new(5, 3)
      @unwrap = unwrap
    end

    def forward(x)
      @layers.each { |layer| x = @checkpointed ? Torch::Utils::Checkpoint.checkpoint(layer, x) : layer.call(x) }
      @head.call(@unwrap.call(x))
    end
  end

  class Layer < Torch::NN::Module
    def initialize(wrap, unwrap)
      super()
      @inner = Torch::NN::Linear.new(5, 5)
      @wrap = wrap
      @unwrap = unwrap
    end

    def forward(x)
      @wrap.call(@inner.call(x.is_a?(Torch::Tensor) ? x : @unwrap.call(x)).tanh)
    end
  end

  def test_outputs_of_many_classes_train_as_one_process
    found = world(2) do |rank|
      KINDS.values.flat_map do |wrap, unwrap|
        policy = FSDP::MixedPrecisionPolicy.new(output_dtype: :float64)
        checkpointed = make { Chain.new(wrap, unwrap, checkpointed: true) }
        [shard(make { Chain.new(wrap, unwrap) }), shard(make { Chain.new(wrap, unwrap) }, mp_policy: policy), shard(checkpointed),
          Torch::NN::Parallel::DistributedDataParallel.new(make { Chain.new(wrap, unwrap) }, find_unused_parameters: true)].map do |model|
          plain = make { Chain.new(wrap, unwrap) }
          trained(plain, model, rank)
        end
      end
    end
    assert_operator found.flatten.max, :<, 1e-10
  end

  def trained(plain, model, rank)
    optimizers = [plain, model].map { |of| Torch::Optim::Adam.new(of.parameters, lr: 0.01) }
    4.times do |step|
      x, y = batch(step, 2)
      optimizers.each(&:zero_grad)
      loss(plain.call(x), y).backward
      loss(model.call(mine(x, rank, 2)), mine(y, rank, 2)).backward
      optimizers.each(&:step)
    end
    difference(plain, model.is_a?(FSDP::FSDPModule) ? FSDP.full_state_dict(model) : model.module.state_dict)
  end

  # A unit that returns its loss in an object, as whole models do.
  def test_a_loss_in_an_object
    found = world(2) do |rank|
      make_model = lambda do
        make { Chain.new(*KINDS[:object]) }.tap { |model| model.define_singleton_method(:forward) { |x| Output.new(loss: super(x).pow(2).mean) } }
      end
      plain, model = make_model.call, shard(make_model.call)
      [[plain, batch(0, 2)[0]], [model, mine(batch(0, 2)[0], rank, 2)]].each { |each, x| each.call(x).data[:loss].backward }
      full = FSDP.full_state_dict(model).keys
      [full.size, plain.parameters.zip(model.parameters).map { |whole, piece| (whole.grad.sum - Torch::Distributed.all_reduce(piece.grad.sum)).abs.item }.max]
    end
    found.each do |names, apart|
      assert_equal 8, names
      assert_operator apart, :<, 1e-10
    end
  end

  def test_what_cannot_be_looked_into_is_an_error_in_forward
    found = world(2) do |rank|
      hiding = -> { Chain.new(->(x) { -> { x } }, ->(x) { x.call }) }
      x = mine(batch(0, 2)[0], rank, 2)
      sharded = shard(make(&hiding))
      ddp = lambda do
        Torch::NN::Parallel::DistributedDataParallel.new(make(&hiding).layers[0], find_unused_parameters: true)
      end
      errors = [failure { sharded.call(x) }, failure { ddp.call.call(x) }, failure { Torch::Utils::Checkpoint.checkpoint(make(&hiding).layers[0], x) }]
      beside = shard(make { Chain.new(->(y) { [y, -> {}] }, ->(list) { list[0] }) })
      beside.call(x).sum.backward
      [errors, Torch.no_grad { sharded.call(x) }.shape, beside.parameters.all?(&:grad)]
    end
    found.each do |(sharded, ddp, segment), shape, trained|
      assert trained
      assert_match(/TypeError fully_shard of a \S*Layer: forward returned a Proc, in which no tensor can be looked for/, sharded.join(" "))
      assert_match(/TypeError DistributedDataParallel of a \S*Layer: forward returned a Proc/, ddp.join(" "))
      assert_match(/TypeError a checkpointed segment: forward returned a Proc/, segment.join(" "))
      assert_equal [2, 3], shape
    end
  end

  # --- methods that call forward themselves ---

  class Generator < Torch::NN::Module
    attr_reader :layers

    def initialize
      super
      @layers = Torch::NN::ModuleList.new([Torch::NN::Linear.new(4, 4)])
      @head = Torch::NN::Linear.new(4, 4)
    end

    def forward(x)
      @head.call(@layers[0].call(x).tanh)
    end

    def generate(x, steps: 2, &block)
      Torch.no_grad { steps.times { x = block ? block.call(forward(x)) : forward(x) } }
      x
    end

    def encode(x)
      @head.call(x)
    end
  end

  def test_methods_that_call_forward
    found = world(2) do
      plain, model = make { Generator.new }, shard(make { Generator.new })
      wrapped = FSDP::FullyShardedDataParallel.new(make { Generator.new })
      x = Torch.ones(2, 4, dtype: :float64)
      refused = [failure { model.generate(x) }, failure { model.encode(x) }, failure { model.forward(x) }, failure { wrapped.module.generate(x) }]
      FSDP.register_fsdp_forward_method(model, :generate)
      FSDP.register_fsdp_forward_method(model, "encode")
      FSDP.register_fsdp_forward_method(wrapped, :generate)
      FSDP.register_fsdp_forward_method(plain, :generate) # nothing, as in PyTorch
      expected = [plain.generate(x), plain.generate(x, steps: 3) { |y| y * 2 }, plain.encode(x)]
      got = [model.generate(x), model.generate(x, steps: 3) { |y| y * 2 }, model.encode(x)]
      same = expected.zip(got).all? { |one, other| one.equal(other) } && wrapped.module.generate(x).equal(expected[0])
      [plain, model].each { |each| each.encode(x).sum.backward }
      grads = [plain, model].map { |each| each.parameters.map { |parameter| parameter.grad&.sum } }
      # Of what the method left out there is none, on any rank.
      apart = grads[0].zip(grads[1]).map { |one, other| one ? (Torch::Distributed.all_reduce(other) - one).abs.item : [other].compact.size }.max
      wrong = [failure { FSDP.register_fsdp_forward_method(model, :generat) }, failure { FSDP.register_fsdp_forward_method(7, :generate) }]
      held = model.parameters.map { |each| each.to_local.dim }.uniq
      [refused, same, apart, wrong.map(&:last), held]
    end
    found.each do |refused, same, apart, wrong, held|
      refused.each { |_, text| assert_match(/forward of this Torch::NN::Linear: fully_shard has sharded its.*register_fsdp_forward_method\(model, :generate\)/, text) }
      assert_equal [true, [1]], [same, held]
      assert_operator apart, :<, 1e-10
      assert_match(/method_name: expected a method of this \S*Generator, got :generat\z/, wrong[0])
      assert_match(/mod: expected a Torch::NN::Module, got 7/, wrong[1])
    end
  end

  # A module that has parameters itself, and a unit that is gathered by hand.
  def test_forward_of_what_is_gathered
    found = world(2) do
      model = FSDP.fully_shard(make { Torch::NN::Linear.new(4, 4) })
      x = Torch.ones(2, 4, dtype: :float64)
      before = failure { model.forward(x) }
      model.unshard
      within = model.forward(x).shape
      model.reshard
      [before&.last.to_s[/gathered now/], within, FSDP.summon_full_params(model) { model.forward(x).shape }, failure { model.forward(x) }.nil?]
    end
    assert_equal [["gathered now", [2, 4], [2, 4], false]] * 2, found
  end
end
