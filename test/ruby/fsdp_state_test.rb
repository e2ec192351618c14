# frozen_string_literal: true

require_relative "sharded_training"

# Full parameters of sharded models, dtypes, mistakes, and what is left after an exception.
class FsdpStateTest < Minitest::Test
  include ShardedTraining

  MixedPrecision = Torch::Distributed::FSDP::MixedPrecisionPolicy

  # --- full parameters ---

  def test_full_parameters_within_a_block
    found = world(3) do |rank|
      plain, model = tower, shard(tower)
      seen = FSDP.summon_full_params(model) do
        same = plain.named_parameters.all? { |name, tensor| tensor.detach.equal(model.named_parameters[name].detach) }
        Torch.no_grad { model.named_parameters.each_value { |tensor| tensor.mul!(2) } }
        [same, model.head.weight.shape]
      end
      FSDP.summon_full_params(model, writeback: false) { Torch.no_grad { model.head.weight.zero! } }
      full = FSDP.full_state_dict(model)
      [seen, plain.state_dict.map { |name, tensor| (tensor.detach * 2 - full[name]).abs.max.item }.max, model.head.weight.to_local.dim, rank]
    end
    found.each { |seen, apart, dims, _| assert_equal [[true, [3, 7]], 0, 1], [seen, apart, dims] }
  end

  def test_the_state_on_rank_0_alone
    found = world(2) do
      plain, model = tower, shard(tower)
      full = FSDP.full_state_dict(model, rank0_only: true)
      [full.keys, full.all? { |name, tensor| tensor.equal(plain.state_dict[name]) }, plain.state_dict.keys]
    end
    assert_equal [found[0][2], []], found.map(&:first)
    assert_equal [true, true], found.map { |each| each[1] }
  end

  # Rank 0 has the copies besides; the budget has garbage collected after each unit.
  def test_the_state_is_gathered_unit_by_unit
    found = world(2) do
      model = shard(make { Tower.new(width: 32, hidden: 64, depth: 12) })
      unit = model.layers[0].parameters.sum(&:numel) * 8
      Torch::Distributed.synchronize_gc(budget: unit)
      GC.start
      Torch::Distributed.reset_peak_memory_stats
      before = Torch::Distributed.memory_stats[:current_bytes]
      full = FSDP.full_state_dict(model, rank0_only: true)
      (Torch::Distributed.memory_stats[:peak_bytes] - before - full.values.sum(&:numel) * 8).fdiv(unit)
    end
    found.each { |units| assert_operator units, :<, 4 }
  end

  def test_a_state_is_loaded_into_pieces
    found = world(3) do
      state = make(seed: 7) { Tower.new }.state_dict
      model = FSDP::FullyShardedDataParallel.new(tower, auto_wrap_policy: FSDP::WrapPolicies.module_wrap_policy(Torch::NN::Sequential))
      model.load_full_state_dict(state)
      same = model.full_state_dict.all? { |name, tensor| tensor.equal(state[name]) }
      errors = [
        failure { model.load_full_state_dict(state.except("head.bias")) },
        failure { model.load_full_state_dict(state.merge("head.bias" => Torch.zeros(4, dtype: :float64))) }
      ]
      [same, errors.map(&:last)]
    end
    found.each do |same, errors|
      assert same
      assert_match(/missing \["head.bias"\]/, errors[0])
      assert_match(/"head.bias" has the shape \[4\], expected \[3\]/, errors[1])
    end
  end

  def test_rank_0s_values_go_to_all
    found = world(3) do |rank|
      model = make(seed: rank) { Tower.new }
      wrapped = FSDP::FullyShardedDataParallel.new(model, sync_module_states: true)
      expected = make(seed: 0) { Tower.new }.state_dict
      wrapped.full_state_dict.all? { |name, tensor| tensor.equal(expected[name]) }
    end
    assert_equal [true] * 3, found
  end

  def test_a_unit_that_is_gathered_by_hand
    found = world(2) do
      plain, model = tower, shard(tower)
      layer = model.layers[0]
      before = layer.children[0].weight.to_local.dim
      layer.unshard
      whole = layer.children[0].weight.detach.equal(plain.layers[0].children[0].weight.detach)
      layer.reshard
      [before, whole, layer.children[0].weight.to_local.dim]
    end
    assert_equal [[1, true, 1]] * 2, found
  end

  # --- models that are sharded as they are made ---

  class Layer < Torch::NN::Module
    def initialize(width)
      super()
      @up, @down = Torch::NN::Linear.new(width, 4 * width), Torch::NN::Linear.new(4 * width, width)
    end

    def forward(x)
      x + @down.call(@up.call(x).tanh)
    end
  end

  # Its superclass's `initialize` returns before its own.
  class Scaled < Layer
    def initialize(width)
      super
      @scale = Torch::NN::Parameter.new(Torch.ones(width))
    end

    def forward(x)
      super * @scale
    end
  end

  def stack(width)
    Torch::NN::Sequential.new(*Array.new(6) { |i| (i.even? ? Layer : Scaled).new(width) }, Torch::NN::Linear.new(width, 3))
  end

  def test_a_model_is_sharded_as_it_is_made
    found = world(2) do
      full, values = Thread.new do # with which all of it ends
        plain = make(dtype: :float32) { stack(64) }
        [plain.parameters.sum(&:numel) * 4, plain.state_dict.transform_values(&:to_a)]
      end.value
      GC.start
      Torch::Distributed.synchronize_gc(budget: 1024)
      Torch::Distributed.reset_peak_memory_stats
      before = Torch::Distributed.memory_stats[:current_bytes]
      model = make(dtype: :float32) { FSDP.build(Layer) { stack(64) } }
      peak = Torch::Distributed.memory_stats[:peak_bytes] - before
      units = FSDP.units_of(model).map { |unit| unit.parameters.size }
      errors = [[], [3], [Torch::NN::Conv2d]].map { |classes| failure { FSDP.build(*classes) { Torch::NN::Linear.new(2, 2) } }&.last }
      [FSDP.full_state_dict(model).transform_values(&:to_a) == values, peak.fdiv(full), units, errors]
    end
    found.each do |same, peak, units, errors|
      assert same
      # Half of all, and one layer.
      assert_operator peak, :<, 0.75
      assert_equal [2, 4, 4, 4, 5, 5, 5], units.sort
      assert_match(/classes: expected some of modules, got \[\]/, errors[0])
      assert_match(/classes: expected some of modules, got \[3\]/, errors[1])
      assert_match(/the block has made no Torch::NN::Conv2d/, errors[2])
    end
  end

  # --- dtypes ---

  def test_a_smaller_dtype_within_units
    found = world(2) do |rank|
      model = tower(dtype: :float32)
      seen = []
      model.layers[0].children[1].singleton_class.prepend(Module.new { define_method(:forward) { |x| seen << x.dtype and super(x) } })
      policy = {param_dtype: :bfloat16, reduce_dtype: :float32}
      model.layers.each { |layer| FSDP.fully_shard(layer, mp_policy: MixedPrecision.new(**policy)) }
      FSDP.fully_shard(model, mp_policy: MixedPrecision.new(**policy, output_dtype: :float32))
      x, y = batch(0, 2, dtype: :float32)
      output = model.call(mine(x, rank, 2))
      loss(output, mine(y, rank, 2)).backward
      plain = tower(dtype: :float32)
      loss(plain.call(x), y).backward
      full = plain.named_parameters.transform_values { |parameter| parameter.grad.flatten.to_a }
      [seen, output.dtype, model.parameters.map(&:dtype).uniq, model.named_parameters.transform_values { |piece| [piece.grad.dtype, piece.grad.to_a] }, full]
    end
    found.each do |seen, output, parameters, grads, _|
      assert_equal [[:bfloat16], :float32, [:float32], [:float32]], [seen, output, parameters, grads.values.map(&:first).uniq]
    end
    found[0].last.each do |name, full|
      scale = full.map(&:abs).max
      full.zip(found.flat_map { |each| each[3][name][1] }) { |expected, actual| assert_in_delta expected, actual, 0.05 * scale, name }
    end
  end

  def test_a_larger_dtype_of_reductions
    found = world(2) do |rank|
      model = tower(dtype: :float32)
      FSDP::FullyShardedDataParallel.new(model, mixed_precision: MixedPrecision.new(reduce_dtype: :float64))
      follow(tower(dtype: :float32), model, rank, 2, dtype: :float32)
    end
    assert_operator found.max, :<, 1e-5
  end

  # An infinite loss on one rank: all leave out the step, and the next one is that of one process.
  def test_scaled_losses
    found = world(2) do |rank|
      plain, model = tower, shard(tower)
      optimizers = [plain, model].map { |of| Torch::Optim::Adam.new(of.parameters, lr: 0.01) }
      scaler = FSDP::ShardedGradScaler.new(init_scale: 1024.0)
      scales = [0, 1, 2].map do |step|
        x, y = batch(step, 2)
        optimizers.each(&:zero_grad)
        output = loss(model.call(mine(x, rank, 2)), mine(y, rank, 2))
        output *= Float::INFINITY if step == 1 && rank == 1
        scaler.scale(output).backward
        scaler.step(optimizers[1])
        scaler.update
        loss(plain.call(x), y).backward
        optimizers[0].step unless step == 1
        scaler.get_scale
      end
      [scales, difference(plain, FSDP.full_state_dict(model))]
    end
    found.each do |scales, apart|
      assert_equal [1024.0, 512.0, 512.0], scales
      assert_operator apart, :<, 1e-12
    end
  end

  # --- mistakes: before anything is sent ---

  def test_mistakes
    errors = world(2) do
      linear = -> { Torch::NN::Linear.new(3, 3) }
      mesh = Torch::Distributed.init_device_mesh(:cpu, [2])
      sharded = FSDP.fully_shard(linear.call)
      scalar = linear.call.tap { |mod| mod.instance_variable_set(:@scale, Torch::NN::Parameter.new(Torch.tensor(1.0))) }
      mixed = linear.call.tap { |mod| mod.instance_variable_set(:@scale, Torch::NN::Parameter.new(Torch.zeros(2, dtype: :float64))) }
      wrap = ->(**options) { FSDP::FullyShardedDataParallel.new(linear.call, **options) }
      [
        -> { FSDP.fully_shard(3) }, -> { FSDP.fully_shard([]) }, -> { FSDP.fully_shard(sharded) },
        -> { FSDP.fully_shard(Torch::NN::ModuleList.new([linear.call])) }, -> { FSDP.fully_shard(linear.call, mesh: 2) },
        -> { FSDP.fully_shard(linear.call, reshard_after_forward: 2) }, -> { FSDP.fully_shard(linear.call, mp_policy: :bfloat16) },
        -> { FSDP.fully_shard(scalar) }, -> { FSDP.fully_shard(mixed) }, -> { MixedPrecision.new(param_dtype: :int8) },
        -> { wrap.call(sharding_strategy: :some) }, -> { wrap.call(sharding_strategy: :hybrid_shard) },
        -> { wrap.call(device_mesh: mesh, process_group: mesh.get_group) }, -> { wrap.call(auto_wrap_policy: 3) },
        -> { wrap.call(cpu_offload: 1) }, -> { sharded.to("cpu") }, -> { sharded.dup }, -> { FSDP.full_state_dict(linear.call) }
      ].map { |mistake| failure { mistake.call } }
    end
    expected = [
      /module: expected a Torch::NN::Module, got 3/, /module: expected one or several, got none/, /is a unit already: shard each once/,
      /has no forward of its own: shard the modules in it/, /mesh: expected a DeviceMesh, got 2/,
      /reshard_after_forward: expected true, false or nil, got 2/, /mp_policy: expected a MixedPrecisionPolicy, got :bfloat16/,
      /parameter "scale" has no dimension/, /parameter "scale" is :float64 on cpu, "weight" :float32/, /param_dtype: expected one of .* got :int8/,
      /sharding_strategy: expected one of .*, got :some/, /device_mesh: expected two dimensions, .* got none/,
      /process_group: expected nil beside a device_mesh/, /auto_wrap_policy: expected something to call/, /cpu_offload: expected true, false or nil, got 1/,
      /has been sharded by fully_shard: move or convert it before that/, /cannot be copied/, /is not sharded: see fully_shard/
    ]
    errors.each { |of| expected.zip(of) { |pattern, (_, text)| assert_match pattern, text.to_s } }
  end

  def test_a_parameter_that_is_replaced_after_sharding
    found = world(2) do
      model = shard(tower)
      model.head.instance_variable_set(:@weight, Torch::NN::Parameter.new(Torch.zeros(3, 7, dtype: :float64)))
      failure { model.call(batch(0, 1)[0]) }
    end
    found.each { |_, text| assert_match(/parameter "head.weight" of a Torch::NN::Linear is another one than when it was sharded/, text) }
  end

  def test_a_part_that_is_sharded_after_the_model_has_run
    found = world(2) do
      model = tower
      FSDP.fully_shard(model.layers[0])
      model.layers[0].call(Torch.zeros(2, 7, dtype: :float64)).sum.backward
      failure { FSDP.fully_shard(model.layers[1]).then { FSDP.fully_shard(model) } }
    end
    found.each { |_, text| assert_match(/has been used already: shard all parts of a model, the model itself last, before its first forward/, text) }
  end

  def test_models_that_differ
    found = world(2) { |rank| failure { FSDP.fully_shard(Torch::NN::Linear.new(3, 3 + rank)) } }
    found.each do |name, text|
      assert_equal "Torch::Distributed::MismatchError", name
      assert_match(/parameter "weight" of unit ".*Linear \(unit 0\)" \(number 0\) is float32 \[3, 3\] on rank 0, but float32 \[4, 3\] on rank 1/, text)
    end
  end

  def test_second_derivatives_are_refused
    found = world(2) do
      model = shard(tower)
      failure { model.call(batch(0, 1)[0]).pow(2).sum.backward(create_graph: true) }
    end
    found.each { |_, text| assert_match(/sharded parameters have no second derivatives/, text) }
  end

  # --- exceptions ---

  # On all ranks; training goes on as if nothing had been.
  def test_exceptions_in_forward_and_backward
    found = world(2) do |rank|
      plain, model = tower, shard(tower)
      broken = nil
      model.layers[1].children[1].singleton_class.prepend(Module.new do
        define_method(:forward) do |x|
          raise ArgumentError, "in forward" if broken == :forward

          (broken == :backward) ? Failing.apply(super(x)) : super(x)
        end
      end)
      shapes = %i[forward backward forward].map do |where|
        broken = where
        raised = failure { model.call(mine(batch(9, 2)[0], rank, 2)).sum.backward }
        broken = nil
        [raised&.last.to_s[/in (forward|backward)/], model.parameters.map { |each| each.to_local.dim }.uniq]
      end
      [shapes, follow(plain, model, rank, 2, steps: 4)]
    end
    found.each do |shapes, apart|
      assert_equal ["in forward", "in backward", "in forward"], shapes.map(&:first)
      # After backward's end only: the next forward of the model frees what an exception has left.
      assert_equal [[1], [1]], shapes.map(&:last).values_at(0, 2)
      assert_operator apart, :<, 1e-10
    end
  end

  class Failing < Torch::Distributed::Function
    def self.forward(_ctx, x)
      x.clone
    end

    def self.backward(_ctx, _grad)
      raise ArgumentError, "in backward"
    end
  end

  # test/c/sharder kills ranks amid gathers and reductions.
  def test_a_rank_that_is_killed_while_others_shard
    found = without(2, within: true) { failure { shard(tower) } }
    found.each { |(name, _), _| assert_equal "Torch::Distributed::PeerLostError", name }
  end
end
