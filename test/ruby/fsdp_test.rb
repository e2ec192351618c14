# frozen_string_literal: true

require_relative "sharded_training"

# Sharded training follows one process: strategies, optimizers, world sizes.
class FsdpTest < Minitest::Test
  include ShardedTraining

  OPTIMIZERS = {
    adam: ->(parameters) { Torch::Optim::Adam.new(parameters, lr: 0.01) },
    momentum: ->(parameters) { Torch::Optim::SGD.new(parameters, lr: 0.05, momentum: 0.9) },
    rmsprop: ->(parameters) { Torch::Optim::RMSprop.new(parameters, lr: 0.01) },
    fused: ->(parameters) { Torch::Distributed::Optim::FusedAdamW.new(parameters, lr: 0.01, weight_decay: 0.1) }
  }.freeze

  STRATEGIES = %i[full_shard shard_grad_op no_shard].freeze

  (1..4).each do |size|
    STRATEGIES.each do |strategy|
      define_method(:"test_#{strategy}_on_#{size}_ranks") do
        found = world(size) do |rank|
          # All of them where most can go wrong.
          ((strategy == :full_shard) ? OPTIMIZERS : OPTIMIZERS.slice(:adam)).map do |name, optimizer|
            policy = FSDP::WrapPolicies.module_wrap_policy(Torch::NN::Sequential)
            model = FSDP::FullyShardedDataParallel.new(tower, sharding_strategy: strategy, auto_wrap_policy: policy)
            follow(tower, model, rank, size, optimizer: optimizer, steps: (name == :adam) ? 10 : 5)
          end
        end
        assert_operator found.flatten.max, :<, 1e-10
      end
    end

    define_method(:"test_units_of_one_precision_on_#{size}_ranks") do
      found = world(size) { |rank| follow(tower(dtype: :float32), shard(tower(dtype: :float32)), rank, size, dtype: :float32) }
      assert_operator found.max, :<, 1e-5
    end
  end

  def test_shards_with_replicas
    found = world(4) do |rank|
      mesh = Torch::Distributed.init_device_mesh(:cpu, [2, 2], mesh_dim_names: %w[replicate shard])
      policy = FSDP::WrapPolicies.module_wrap_policy(Torch::NN::Sequential)
      model = FSDP::FullyShardedDataParallel.new(tower, sharding_strategy: "HYBRID_SHARD", auto_wrap_policy: policy, device_mesh: mesh)
      [follow(tower, model, rank, 4, clip: 0.1), model.parameters.sum { |each| each.to_local.numel }]
    end
    assert_operator found.map(&:first).max, :<, 1e-10
    # Each pair of replicas has the same shard.
    assert_equal found.map(&:last).values_at(0, 1), found.map(&:last).values_at(2, 3)
  end

  def test_a_mesh_of_one_dimension
    found = world(3) do |rank|
      mesh = Torch::Distributed.init_device_mesh(:cpu, [3])
      follow(tower, shard(tower, mesh: mesh), rank, 3)
    end
    assert_operator found.max, :<, 1e-10
  end

  # Without gloo's threads and with them, and as one unit.
  def test_the_model_as_one_unit
    found = world(2) { |rank| follow(tower, FSDP.fully_shard(tower), rank, 2) }
    assert_operator found.max, :<, 1e-10
  end

  def test_offloading_changes_nothing_on_the_cpu
    found = world(2) do |rank|
      model = shard(tower, offload_policy: FSDP::CPUOffloadPolicy.new)
      [follow(tower, model, rank, 2, steps: 5), FSDP.units_of(model).first.state.model.copied]
    end
    assert_operator found.map(&:first).max, :<, 1e-10
    assert_equal [[0, 0]], found.map(&:last).uniq
  end

  def test_another_precision_where_nothing_is_divided
    found = world(2) do |rank|
      policy = FSDP::MixedPrecisionPolicy.new(param_dtype: :float32)
      model = FSDP::FullyShardedDataParallel.new(tower, sharding_strategy: :no_shard, mixed_precision: policy)
      [follow(tower, model, rank, 2, steps: 3), model.parameters.first.dtype]
    end
    assert_operator found.map(&:first).max, :<, 1e-5
    assert_operator found.map(&:first).min, :>, 1e-10
    assert_equal [:float64], found.map(&:last).uniq
  end

  def test_several_modules_as_one_unit
    found = world(2) do |rank|
      model = tower
      FSDP.fully_shard([model.layers[0], model.layers[1]])
      follow(tower, FSDP.fully_shard(model), rank, 2)
    end
    assert_operator found.max, :<, 1e-10
  end

  def test_gradients_are_clipped_by_the_norm_of_all
    found = world(3) do |rank|
      model = FSDP::FullyShardedDataParallel.new(tower, auto_wrap_policy: FSDP::WrapPolicies.size_based_auto_wrap_policy(min_num_params: 100))
      follow(tower, model, rank, 3, clip: 0.05)
    end
    assert_operator found.max, :<, 1e-10
  end

  # Those that are left alone are the same on all ranks, and count once.
  def test_the_norm_with_parameters_that_are_left_alone
    found = world(3) do |rank|
      plain, model = tower, tower
      model.layers.each { |layer| FSDP.fully_shard(layer) }
      FSDP.fully_shard(model, ignored_params: model.head.parameters)
      x, y = batch(0, 1)
      [plain, model].each { |of| loss(of.call(x), y).backward }
      expected = Torch::NN::Utils.clip_grad_norm_(plain.parameters, 0.01).item
      norm = model.clip_grad_norm_(0.01).item
      [(norm - expected).abs / expected, (model.head.weight.grad - plain.head.weight.grad).abs.max.item, rank]
    end
    found.each { |norm, grad, _| assert_operator [norm, grad].max, :<, 1e-12 }
  end

  # --- what a rank holds ---

  def test_each_rank_holds_its_piece_of_every_parameter
    found = world(3) do |rank|
      plain = tower
      model = shard(tower)
      pieces = model.named_parameters.map { |name, piece| [name, piece.to_local.shape, piece.to_a] }
      [pieces, plain.named_parameters.map { |name, parameter| [name, parameter.flatten.to_a] }, rank]
    end
    pieces = found.map(&:first)
    found[0][1].each_with_index do |(name, values), i|
      assert_equal [name], pieces.map { |of| of[i][0] }.uniq
      assert_equal values, pieces.flat_map { |of| of[i][2] }
      assert_equal [1], pieces.map { |of| of[i][1].size }.uniq
    end
  end

  def test_parameters_are_whole_objects_while_their_unit_runs
    shapes = world(2) do
      model = shard(tower)
      linear, tanh, = model.layers[1].children
      weight = linear.weight
      seen = []
      tanh.singleton_class.prepend(Module.new { define_method(:forward) { |x| seen << weight.to_local.shape and super(x) } })
      before = weight.to_local.dim
      model.call(batch(0, 1)[0])
      [before, seen, weight.to_local.dim, weight.equal?(linear.weight)]
    end
    assert_equal [[1, [[11, 7]], 1, true]] * 2, shapes
  end

  # The first gradients of an optimizer's life: nothing is left of the full ones.
  def test_gradients_are_those_of_the_pieces
    found = world(2) do |rank|
      plain, model = tower, shard(tower)
      x, y = batch(3, 2)
      loss(plain.call(x), y).backward
      loss(model.call(mine(x, rank, 2)), mine(y, rank, 2)).backward
      model.named_parameters.map { |name, piece| [name, piece.grad.to_a, plain.named_parameters[name].grad.flatten.to_a] }
    end
    found[0].zip(found[1]) do |(name, first, full), (_, second, _)|
      [*first, *second].zip(full) { |actual, expected| assert_in_delta expected, actual, 1e-12, name }
    end
  end

  # Two units and two gradients, however deep the model; with reshard_after_forward: false all units. It stays theirs between steps.
  def test_memory_is_that_of_two_units_or_of_all
    depth = 12
    found = world(2) do |rank|
      [nil, false].map do |reshard|
        model = shard(make { Tower.new(width: 32, hidden: 64, depth: depth) }, reshard_after_forward: reshard)
        optimizer = Torch::Optim::SGD.new(model.parameters, lr: 0.01)
        3.times do |step|
          x, y = batch(step, 2)
          optimizer.zero_grad
          loss(model.call(mine(x, rank, 2)), mine(y, rank, 2)).backward
          optimizer.step
        end
        unit = model.layers[0].parameters.sum(&:numel) * 8
        Torch::Distributed::FSDP.units_of(model).first.state.model.memory.map { |bytes| bytes.fdiv(unit) }
      end
    end
    found.flatten(1).each { |shards, now, peak| assert_equal [true, now], [shards < 0.6 * depth, peak] }
    found.map { |each| each.map(&:last) }.each do |freed, kept|
      # The root is small, and the result of a reduction half a unit.
      assert_operator freed, :<, 5.2
      assert_includes depth + 2..depth + 3.2, kept
    end
  end
end
