# frozen_string_literal: true

require_relative "test_helper"
require "torch/distributed/fsdp"
require "torch/distributed/optim/zero_redundancy_optimizer"

class MemoryEstimateTest < Minitest::Test
  FSDP = Distributed::FSDP
  MIB = 1 << 20

  # Layers between something before and something after them.
  class Layered < Torch::NN::Module
    attr_reader :layers

    def initialize(layers, before: nil, after: nil)
      super()
      @before = before
      @layers = Torch::NN::ModuleList.new(layers)
      @after = after
    end

    def forward(x)
      [@before, *@layers.children.map(&:itself), @after].compact.reduce(x) { |value, layer| layer.call(value) }
    end
  end

  class Block < Torch::NN::Module
    def initialize(width)
      super()
      @norm = Torch::NN::LayerNorm.new(width)
      @up = Torch::NN::Linear.new(width, 4 * width)
      @down = Torch::NN::Linear.new(4 * width, width)
    end

    def forward(x)
      x + @down.call(Torch::NN::F.relu(@up.call(@norm.call(x))))
    end
  end

  # 50 words, 32 wide.
  def language_model(blocks: 4, width: 32, words: 50)
    Layered.new(Array.new(blocks) { Block.new(width) }, before: Torch::NN::Embedding.new(words, width), after: Torch::NN::Linear.new(width, words))
  end

  def linears(widths, before: nil, after: nil)
    Layered.new(widths.each_cons(2).map { |a, b| Torch::NN::Linear.new(a, b) }, before: before && Torch::NN::Linear.new(before, widths.first),
      after: after && Torch::NN::Linear.new(widths.last, after))
  end

  def sharded(model, strategy: :full_shard, **options)
    model.layers.each { |layer| FSDP.fully_shard(layer, reshard_after_forward: (strategy == :full_shard) ? nil : false, **options) }
    FSDP.fully_shard(model, **options)
  end

  def estimate(model, **options, &block)
    Distributed.estimate_memory(model, **options, &block)
  end

  # --- what is computed

  # 8 x 8 + 8 = 72 elements each layer, the head 8 x 3 + 3 = 27.
  def test_states
    found = estimate(linears([8, 8, 8], after: 3), world_size: 4, optimizer: 12).to_h.transform_values { |row| row.values_at(:parameters, :gradients, :optimizer) }
    buckets = 2 * (256 + 64) + 128 + 64 # slices of 64 bytes or a multiple
    shards = (2 * 32 + 16) * 4 # of 64 + 16 elements by 4, and of 32 + 16, in multiples of 16
    assert_equal({no_shard: [171 * 4, buckets, 171 * 12], zero: [171 * 4, buckets, 43 * 12], shard_grad_op: [shards, shards, 80 * 12],
      full_shard: [shards, shards, 80 * 12]}, found)
  end

  def test_a_tied_parameter_counts_once
    model = linears([8, 8], before: 8, after: 8)
    before = estimate(model, world_size: 2)[:no_shard]
    first, last = model.instance_variable_get(:@before), model.instance_variable_get(:@after)
    last.instance_variable_set(:@weight, first.weight)
    tied = estimate(model, world_size: 2)
    assert_equal 64 * 4, before.parameters - tied[:no_shard].parameters
    assert_equal 64 * 8, before.optimizer - tied[:no_shard].optimizer
    assert_match(/\A152 parameters, 2 units/, tied.to_s)
  end

  def test_frozen_parameters_and_buffers
    model = Torch::NN::Sequential.new(Torch::NN::Linear.new(16, 16, bias: false), Torch::NN::BatchNorm1d.new(16))
    model.parameters.first.requires_grad = false
    row = estimate(model, world_size: 1)[:no_shard]
    buffers = model.modules.to_a.flat_map { |each| each.named_buffers.values }.sum { |each| each.numel * each.element_size }
    assert_operator buffers, :>=, 128
    assert_equal [(256 + 32) * 4 + buffers, 128, 32 * 8], [row.parameters, row.gradients, row.optimizer]
  end

  def test_optimizers
    bytes = {sgd: 0, sgd_momentum: 4, adam: 8, adamw: 8, fused_adam: 8, fused_adamw: 8, rmsprop: 4, adagrad: 4, adadelta: 8, adamax: 8}
    model = linears([16, 16])
    names = bytes.keys.to_h { |name| [name, estimate(model, world_size: 1, optimizer: name)[:no_shard].optimizer / 272.0] }
    assert_equal bytes, names
    others = [Torch::Optim::SGD, Torch::Optim::Adam, Distributed::Optim::FusedAdam, ->(params) { Torch::Optim::Adam.new(params, amsgrad: true) }, 6, "Adam"]
    assert_equal [0, 8, 8, 12, 6, 8], others.map { |each| estimate(model, world_size: 1, optimizer: each)[:no_shard].optimizer / 272 }
  end

  # torch-rb's Adam makes two tensors of each parameter's size in a step, which wait for the collector.
  def test_what_a_step_leaves
    left = %i[adam fused_adam].map { |name| estimate(linears([64, 64]), world_size: 1, optimizer: name)[:no_shard].temporaries }
    assert_in_delta 4160 * 8, left[0], 100
    assert_in_delta 4160 * 4, left[1], 100 # a gradient, or the buckets of the second iteration
  end

  def test_other_dtypes
    model = linears([16, 16])
    Torch.no_grad { model.parameters.each { |each| each.set_data(each.data.to(dtype: :float64)) } }
    row = estimate(model, world_size: 1)[:no_shard]
    assert_equal [272 * 8, 272 * 8, 272 * 16], [row.parameters, row.gradients, row.optimizer]
  end

  # --- units

  UNITS = [[[32, 32, 32, 32, 32], {}], [[32, 64, 96, 32, 16, 128, 32], {before: 20}], [[64, 16, 16, 64], {before: 20, after: 40}],
    [[16, 16, 16], {after: 40}]].freeze

  # The sharder says what it had at most.
  def test_unsharded_units
    UNITS.product(%i[full_shard shard_grad_op]).zip([2, 2, 1].cycle).group_by(&:last).each do |ranks, cases|
      found = world(ranks) do |rank|
        cases.map do |((widths, around), strategy), _|
          model = linears(widths, **around)
          guessed = estimate(model)[strategy].unsharded if rank.zero?
          sharded(model, strategy: strategy)
          x = Torch.randn(4, around[:before] || widths.first)
          4.times { model.call(x).sum.backward }
          [guessed, estimate(model)[strategy].unsharded, FSDP.units_of(model).first.state.model.memory.last]
        end
      end.first
      found.zip(cases) { |bytes, each| assert_equal [bytes.last] * 3, bytes, each.inspect }
    end
  end

  def test_units_in_lower_precision
    policy = FSDP::MixedPrecisionPolicy.new(param_dtype: :bfloat16)
    found = world(2) do
      rows = [policy, :bfloat16, nil].map { |precision| estimate(linears([32, 32, 32, 32], after: 10), mixed_precision: precision)[:full_shard] }
      model = sharded(linears([32, 32, 32, 32], after: 10), mp_policy: policy)
      [*rows, estimate(model)[:full_shard]].map { |row| [row.unsharded, row.parameters] }
    end.first
    assert_equal found[0], found[1]
    assert_equal found[0], found[3]
    assert_operator found[0].first, :<=, 0.6 * found[2].first
    assert_equal found[0].last, found[2].last
    casts = estimate(linears([32, 32]), world_size: 2, mixed_precision: Torch::NN::Parallel::MixedPrecision.new(param_dtype: :bfloat16))
    assert_equal 1056 * 2, casts[:no_shard].unsharded
  end

  def test_a_sharded_model_is_described_by_its_units
    found = world(2) do
      model = language_model
      plain = estimate(model).to_h
      sharded(model)
      [plain, estimate(model).to_h, estimate(FSDP::FullyShardedDataParallel.new(language_model, auto_wrap_policy: FSDP::WrapPolicies.module_wrap_policy(Block))).to_h]
    end
    found.each { |plain, own, wrapped| assert_equal [plain, plain], [own, wrapped] }
  end

  # --- activations

  def traced(*shape, **options, &loss)
    Distributed.fork_world(1) do
      model = Layered.new(Array.new(4) { Torch::NN::Sequential.new(Torch::NN::Linear.new(64, 64), Torch::NN::Tanh.new) })
      rows = estimate(model, world_size: 1, batch: Torch.randn(*shape), **options, &loss)
      [rows[:no_shard].activations, rows[:no_shard].temporaries, model.parameters.map(&:grad).compact.size]
    end.first
  end

  # Each Tanh keeps its result, which the next layer keeps as its input too.
  def test_what_forward_keeps
    saved, more, gradients = traced(128, 64, optimizer: 0)
    each = 128 * 64 * 4
    assert_includes 4 * each..4 * each + 200, saved
    assert_operator more, :>=, 4 * each # what Linear gave, which nobody needs any more
    assert_equal 0, gradients
    assert_in_delta 2 * saved, traced(256, 64, optimizer: 0).first, 200
  end

  # Of a block within which much is computed they keep the input alone.
  def test_checkpointed_layers_keep_less
    x = Torch.randint(0, 50, [8, 32]).long
    saved = [nil, 0, 0.5, 1].map do |ratio|
      Distributed.fork_world(1) { estimate(language_model, world_size: 2, batch: x, checkpoint_ratio: ratio)[:zero].activations }.first
    end
    assert_equal saved[0], saved[1]
    assert_in_delta (saved[0] + saved[3]) / 2, saved[2], 100
    assert_operator saved[3], :<, 0.4 * saved[0]
  end

  def test_a_loss_of_one_s_own
    plain, squared = traced(128, 64).first, traced(128, 64) { |output| (output * output * output).mean }.first
    assert_operator squared - plain, :>=, 128 * 64 * 4
  end

  def test_the_model_is_left_as_it_was
    found = Distributed.fork_world(1) do
      model = Torch::NN::Sequential.new(Torch::NN::Linear.new(8, 8), Torch::NN::BatchNorm1d.new(8), Torch::NN::Dropout.new, Torch::NN::Linear.new(8, 8))
      x = Torch.randn(16, 8)
      model.children.last.call(x).sum.backward
      state = -> { [model.state_dict.transform_values(&:to_a), model.parameters.map { |each| each.grad&.to_a }, Distributed.get_rng_state.to_a, GC.disable] }
      GC.enable
      states = [state.call]
      GC.enable
      runs = 0
      model.singleton_class.prepend(Module.new { define_method(:forward) { |input| (runs += 1) && super(input) } })
      estimate(model, world_size: 1, batch: [x])
      states << state.call
      [states.uniq.size, (2..5).cover?(runs)]
    end
    assert_equal [[1, true]], found
  end

  # --- as measured

  def train(strategy, model, x, y)
    parallel = %i[no_shard zero].include?(strategy) ? Torch::NN::Parallel::DistributedDataParallel.new(model) : sharded(model, strategy: strategy)
    kind = Distributed::Optim::ZeroRedundancyOptimizer
    optimizer = (strategy == :zero) ? kind.new(parallel.parameters, optimizer_class: Torch::Optim::Adam) : Torch::Optim::Adam.new(parallel.parameters)
    4.times do
      # Threads of their own: what a stack still refers to would not be collected, as one of the gradients that zero_grad has looked at, and
      # with it all buckets of the first step, which the second forward replaces.
      Thread.new { optimizer.zero_grad }.join
      Thread.new do
        loss(parallel.call(x), y).backward
        optimizer.step
      end.join
      collect
    end
  end

  # From now on between steps only.
  def collect
    GC.enable
    GC.start
    GC.disable
  end

  def loss(output, y)
    Torch::NN::F.cross_entropy(output.view(-1, output.shape.last), y)
  end

  # What a rank had at most, from before the model was made until after some steps.
  def measured(strategy, ranks, x, y)
    world(ranks) do
      2.times { collect } # what other tests have left
      Distributed.synchronize_gc(every: 1)
      Distributed.reset_peak_memory_stats
      before = Distributed.memory_stats[:current_bytes]
      train(strategy, language_model(width: 64), x, y)
      Distributed.memory_stats[:peak_bytes] - before
    end
  end

  def test_it_is_what_training_takes
    x = Torch.randint(0, 50, [4, 32]).long
    y = Torch.randint(0, 50, [128]).long
    {2 => %i[no_shard zero shard_grad_op full_shard], 3 => %i[zero full_shard]}.each do |ranks, strategies|
      totals = Distributed.fork_world(1) { estimate(language_model(width: 64), world_size: ranks, batch: x) { |output| loss(output, y) }.to_h }.first
      strategies.each do |strategy|
        measured(strategy, ranks, x, y).each { |bytes| assert_in_delta 1, totals[strategy][:total].fdiv(bytes), 0.1, "#{strategy} on #{ranks} ranks" }
      end
    end
  end

  # On all ranks, since its units are gathered.
  def test_a_sharded_model_s_activations
    x = Torch.randint(0, 50, [4, 32]).long
    y = Torch.randint(0, 50, [128]).long
    found = world(2) do
      plain = estimate(language_model, batch: x) { |output| loss(output, y) }[:full_shard]
      own = estimate(sharded(language_model), batch: x) { |output| loss(output, y) }[:full_shard]
      [plain, own].map { |row| [row.activations, row.total] }
    end
    found.each { |plain, own| plain.zip(own) { |one, other| assert_in_delta 1, one.fdiv(other), 0.02 } }
  end

  # --- the result

  def test_a_table
    made = estimate(linears([512, 512], after: 10), world_size: 4, optimizer: :adam, limit: 8 * MIB)
    assert_equal <<~TEXT.chomp, made.to_s
      267,786 parameters, 2 units, 4 ranks, adam
      MiB on each rank  parameters  gradients  optimizer  unsharded  activations  temporaries  total  fits
      no_shard                 1.0        1.0        2.0        0.0            ?          2.0    6.1   yes
      zero                     1.0        1.0        0.5        0.0            ?          1.0    3.6   yes
      shard_grad_op            0.3        0.3        0.5        2.0            ?          1.0    4.1   yes
      full_shard               0.3        0.3        0.5        2.0            ?          1.0    4.1   yes
      activations: unknown without a batch:, and not in the total
      limit: 8.0 MiB
    TEXT
    assert_equal made.to_s, made.inspect
  end

  def test_what_fits
    made = estimate(linears([512, 512]), world_size: 4, limit: 4 * MIB)
    assert_equal [false, true], [made[:no_shard].fits?, made["zero"].fits?]
    assert_equal made.select(&:fits?).map(&:strategy), made.fitting
    without = estimate(linears([8, 8]), world_size: 4, strategy: [:zero, "full_shard"])
    assert_equal %i[zero full_shard], without.map(&:strategy)
    assert_nil without[:zero].fits?
    assert_equal without[:zero].total, without.to_h[:zero].except(:total).values.sum
    assert_raises(ArgumentError) { without.fitting }
    assert_match(/expected one of \[:zero, :full_shard\], got :no_shard/, assert_raises(KeyError) { without[:no_shard] }.message)
  end

  def test_what_is_wrong_is_said
    model = linears([4, 4])
    {
      {world_size: nil} => "world_size: expected a number of ranks, 1 or more, as there is no process group, got nil",
      {world_size: 0} => "world_size: expected a number of ranks, 1 or more, got 0",
      {strategy: :ddp} => "strategy: expected some of [:no_shard, :zero, :shard_grad_op, :full_shard], or nil for all, got :ddp",
      {strategy: []} => "strategy: expected some of [:no_shard, :zero, :shard_grad_op, :full_shard], or nil for all, got []",
      {limit: 0} => "limit: expected a number of bytes, more than 0, or nil, got 0",
      {batch: "x"} => "batch: expected the model's input, a Torch::Tensor or an Array of all its inputs, or nil, got \"x\"",
      {checkpoint_ratio: 0.5} => "checkpoint_ratio: expected a batch: beside it",
      {checkpoint_ratio: 2, batch: Torch.ones(1)} => "checkpoint_ratio: expected a number from 0 to 1, or nil, got 2",
      {mixed_precision: :int8} => /\Amixed_precision: expected an FSDP::MixedPrecisionPolicy, one of .*, or nil, got :int8\z/,
      {optimizer: -1} => "optimizer: expected 0 bytes or more for each parameter's element, got -1",
      {optimizer: :lamb} => /\Aoptimizer: expected one of :sgd, .* got :lamb\z/,
      {optimizer: String} => /\Aoptimizer: expected .* got String\z/
    }.each { |options, text| assert_operator text, :===, assert_raises(ArgumentError) { estimate(model, world_size: 2, **options) }.message }
    assert_equal "a block: expected a batch: beside it", assert_raises(ArgumentError) { estimate(model, world_size: 2) { 1 } }.message
    assert_match(/\Amodel: expected a Torch::NN::Module, got 3\z/, assert_raises(TypeError) { estimate(3, world_size: 2) }.message)
    assert_match(/\Amodel: expected one with parameters/, assert_raises(ArgumentError) { estimate(Torch::NN::ReLU.new, world_size: 2) }.message)
    text = world(1) { failure { estimate(Torch::NN::Parallel::DistributedDataParallel.new(linears([4, 4]))) } }.first.last
    assert_match(/\Amodel: expected the model itself, got a Torch::NN::Parallel::DistributedDataParallel: pass its `module`\z/, text)
  end
end
