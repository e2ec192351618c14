# frozen_string_literal: true

require_relative "sharded_on_gpu"
require "torch/utils/checkpoint"

# Parameters, gradients, optimizer states and activations that are in the CPU's memory while the GPU does not need them.
class GPUOffloadTest < Minitest::Test
  include ShardedOnGPU

  Checkpoint = Torch::Utils::Checkpoint
  DOUBLE = 8

  def offloaded(model, **options)
    shard(model, offload_policy: FSDP::CPUOffloadPolicy.new, **options)
  end

  def copied(model)
    FSDP.units_of(model).first.state.model.copied
  end

  def test_training_follows_one_process
    policies = [FSDP::CPUOffloadPolicy.new, FSDP::CPUOffloadPolicy.new(pin_memory: false)]
    [1, 2, 3].each do |size|
      found = ranks(size) do |rank|
        policies.map do |policy|
          model = shard(tower, offload_policy: policy)
          worst = follow(tower, model, rank, size, steps: 10, clip: 0.05)
          [worst, devices(model.parameters + model.parameters.map(&:grad)), copied(model)]
        end
      end
      found.flatten(1).each do |worst, where, bytes|
        assert_operator worst, :<, 1e-9, "#{size} ranks: #{found}"
        assert_equal ["cpu"], where
        # Forward and backward copy what is resharded; the model itself is copied for forward alone.
        assert_operator bytes[0], :>, bytes[1]
      end
    end
  end

  # Layers are copied for forward and for backward, the rest of the model for forward alone; gradients once.
  def test_what_is_copied
    found = ranks(2) do
      model = offloaded(tower)
      x, y = batch(0, 1)
      loss(model.call(x), y).backward
      [copied(model), FSDP.units_of(model).map { |unit| unit.state.model.shard(unit.number).numel * DOUBLE }]
    end
    found.each { |bytes, (root, *layers)| assert_equal [root + 2 * layers.sum, root + layers.sum], bytes }
  end

  def test_other_precision_to_compute_in
    found = ranks(2) do |rank|
      results = [{}, {offload_policy: FSDP::CPUOffloadPolicy.new}].map do |options|
        policy = FSDP::MixedPrecisionPolicy.new(param_dtype: :float32, reduce_dtype: :float64)
        model = shard(tower, mp_policy: policy, **options)
        adam = Torch::Optim::Adam.new(model.parameters, lr: 0.01)
        5.times do |step|
          x, y = batch(step, 2)
          adam.zero_grad
          loss(model.call(mine(x, rank, 2)), mine(y, rank, 2)).backward
          adam.step
        end
        FSDP.full_state_dict(model)
      end
      results[0].map { |name, tensor| (tensor - results[1][name]).abs.max.item }.max
    end
    found.each { |difference| assert_operator difference, :<, 1e-9 }
  end

  # Sums over several backwards, in both ways, and a second sum on top of gradients that are there.
  def test_gradients_are_accumulated
    found = ranks(2) do |rank|
      [true, false].map do |sync|
        plain, model = tower, offloaded(tower)
        3.times do |step|
          x, y = batch(step, 2)
          loss(plain.call(x), y).backward
          model.set_requires_gradient_sync(sync || step == 2)
          loss(model.call(mine(x, rank, 2)), mine(y, rank, 2)).backward
        end
        norms = [plain, model].map { |of| of.equal?(plain) ? Torch::NN::Utils.get_total_norm(of.parameters.map(&:grad)) : of.clip_grad_norm_(1e9) }
        norms.map(&:item).reduce(:-).abs
      end
    end
    found.flatten.each { |difference| assert_operator difference, :<, 1e-9 }
  end

  def test_parameters_are_saved_loaded_and_shown_whole
    found = ranks(2) do
      model = offloaded(tower)
      state = tower.state_dict.transform_values { |tensor| tensor.cpu * 2 }
      FSDP.load_full_state_dict(model, state)
      shown = FSDP.summon_full_params(model) do
        model.parameters.each { |parameter| Torch.no_grad { parameter.mul!(2) } }
        devices(model.parameters)
      end
      full = FSDP.full_state_dict(model)
      [full.map { |name, tensor| (tensor - state[name] * 2).abs.max.item }.max, shown, devices(model.parameters)]
    end
    assert_equal [[0.0, [DEVICE], ["cpu"]]] * 2, found
  end

  # A written parameter counts from the next forward on.
  def test_what_is_written_between_forwards
    found = ranks(2) do
      model = offloaded(tower)
      x, = batch(0, 1)
      Torch.no_grad do
        3.times { model.call(x) }
        model.parameters.each(&:zero!)
        [model.call(x).abs.max.item, copied(model)[1]]
      end
    end
    assert_equal [[0.0, 0]] * 2, found
  end

  # What failed leaves nothing behind that the next steps would take.
  def test_training_goes_on_after_an_exception
    found = ranks(2) do |rank|
      plain, model = tower, offloaded(tower)
      stopping = Module.new { define_method(:call) { |input| (input.size(0) == 1) ? raise("stop") : super(input) } }
      model.layers[2].singleton_class.prepend(stopping)
      x, y = batch(0, 2)
      loss(model.call(mine(x, rank, 2)), mine(y, rank, 2)).backward
      model.parameters.each { |parameter| parameter.grad.zero! }
      2.times do
        model.call(mine(x, 0, 4))
      rescue RuntimeError => e
        raise unless e.message == "stop"
      end
      follow(plain, model, rank, 2, steps: 5)
    end
    found.each { |worst| assert_operator worst, :<, 1e-9 }
  end

  # --- activations ---

  # A linear layer saves its input, and tanh its result; weights stay. The model's own input is a leaf.
  def test_activations_wait_on_the_cpu
    found = ranks(1) do
      plain, model = tower, tower
      x, y = batch(0, 2)
      loss(plain.call(x), y).backward
      [false, true].map do |pin_memory|
        model.parameters.each { |parameter| parameter.grad&.zero! }
        error = Checkpoint.save_on_cpu(pin_memory: pin_memory) { loss(model.call(x), y) }
        saved = Checkpoint._saved_on_cpu
        error.backward
        apart = plain.parameters.zip(model.parameters).map { |one, other| (one.grad - other.grad).abs.max.item }.max
        [saved, Checkpoint._saved_on_cpu, apart]
      end
    end
    # Of the three layers, then the head's input, and the loss's difference.
    bytes = 4 * (3 * (7 + 11 + 11) + 7 + 3) * DOUBLE
    found.flatten(1).each { |saved, left, apart| assert_equal [[11, bytes], [0, 0], 0.0], [saved, left, apart] }
  end

  # The shards' full parameters are not copied: the same tensors wait as without sharding.
  def test_activations_of_sharded_models
    found = ranks(2) do |rank|
      plain = tower
      models = [shard(tower), offloaded(tower)]
      models.each { |model| model.layers.each { |layer| Checkpoint.offload_wrapper(layer) } }
      x, y = batch(0, 2)
      loss(plain.call(x), y).backward
      expected = Torch::NN::Utils.get_total_norm(plain.parameters.map(&:grad)).item
      models.map do |model|
        error = loss(model.call(mine(x, rank, 2)), mine(y, rank, 2))
        saved = Checkpoint._saved_on_cpu
        error.backward
        [saved, Checkpoint._saved_on_cpu, (model.clip_grad_norm_(1e9).item - expected).abs < 1e-12]
      end
    end
    bytes = 2 * 3 * (7 + 11 + 11) * DOUBLE
    assert_equal [[[9, bytes], [0, 0], true]] * 4, found.flatten(1)
  end
end
