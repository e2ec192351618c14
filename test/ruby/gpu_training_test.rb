# frozen_string_literal: true

require_relative "on_gpu"
require "torch/distributed/fsdp"

# Training on a GPU, beside that of one plain model on the same GPU with the data of all ranks.
class GPUTrainingTest < Minitest::Test
  include OnGPU

  DDP = Torch::NN::Parallel::DistributedDataParallel
  FSDP = Distributed::FSDP
  Utils = Torch::NN::Utils
  TOLERANCE = 1e-9

  # Layers with a skip, of odd sizes.
  class Tower < Torch::NN::Module
    attr_reader :layers

    def initialize
      super
      @first = Torch::NN::Linear.new(5, 7)
      layer = -> { Torch::NN::Sequential.new(Torch::NN::Linear.new(7, 33), Torch::NN::Tanh.new, Torch::NN::Linear.new(33, 7)) }
      @layers = Torch::NN::ModuleList.new(Array.new(3) { layer.call })
      @last = Torch::NN::Linear.new(7, 3)
    end

    def forward(x)
      x = @first.call(x)
      @layers.each { |layer| x += layer.call(x) }
      @last.call(x)
    end
  end

  # The same on all ranks.
  def tower
    Torch.manual_seed(3)
    Tower.new.double.to(DEVICE)
  end

  def values(shape, seed)
    (Torch.arange(0, shape.inject(1, :*), dtype: :float64) * 0.731 + seed * 1.37).sin.reshape(shape).to(DEVICE)
  end

  # Three rows for each rank.
  def batch(step, size)
    [values([3 * size, 5], step), values([3 * size, 3], step + 0.5)]
  end

  def share(tensor, rank)
    tensor.narrow(0, 3 * rank, 3)
  end

  def loss(output, target)
    (output - target).pow(2).mean
  end

  # @return [Float] the largest difference of two lists of tensors
  def apart(expected, got)
    expected.zip(got).map { |one, other| (one.detach.cpu - other.detach.cpu).abs.max.item }.max
  end

  # Trains a plain model with the data of all ranks, and another with this rank's.
  #
  # @yieldparam plain [Torch::NN::Module] after backward, before the step
  # @yieldparam model [Torch::NN::Module]
  # @return [Float] the largest difference of the losses' means
  def follow(plain, model, rank, size, steps, optimizer)
    optimizers = [optimizer.call(plain), optimizer.call(model)]
    Array.new(steps) do |step|
      x, y = batch(step, size)
      optimizers.each(&:zero_grad)
      whole = loss(plain.call(x), y)
      whole.backward
      part = loss(model.call(share(x, rank)), share(y, rank))
      part.backward
      yield plain, model if block_given?
      optimizers.each(&:step)
      mean = part.detach.clone
      Distributed.all_reduce(mean, op: :avg)
      apart([whole], [mean])
    end.max
  end

  def test_data_parallel_follows_one_process
    [1, 2].each do |size|
      results = ranks(size) do |rank|
        plain, net = tower, tower
        [{}, {bucket_cap_mb: 0.0005}, {gradient_as_bucket_view: false}].map do |options|
          model = DDP.new(net, **options)
          sgd = ->(one) { Torch::Optim::SGD.new(one.parameters, lr: 0.1, momentum: 0.9) }
          gradients = 0.0
          losses = follow(plain, model, rank, size, 5, sgd) do
            gradients = [gradients, apart(plain.parameters.map(&:grad), model.parameters.map(&:grad))].max
          end
          [losses, gradients, apart(plain.parameters, model.parameters), net.parameters.map { |each| Distributed._device_name(each.device) }.uniq]
        end
      end
      results.flatten(1).each do |*differences, devices|
        assert_equal [DEVICE], devices
        differences.each { |difference| assert_operator difference, :<, TOLERANCE, "#{size} ranks: #{results}" }
      end
      assert_equal 1, results.map { |list| list.map { |result| result[2] } }.uniq.size, "ranks differ"
    end
  end

  def test_gradients_are_means
    results = ranks(2) do |rank|
      model = DDP.new(Torch::NN::Linear.new(3, 1, bias: false).to(DEVICE))
      x = Torch.full([1, 3], rank + 1.0).to(DEVICE)
      first = model.no_sync do
        model.call(x).sum.backward
        model.parameters.first.grad.cpu.to_a
      end
      model.call(x).sum.backward
      [first, model.parameters.first.grad.cpu.to_a]
    end
    assert_equal [[[[1.0] * 3], [[3.0] * 3]], [[[2.0] * 3], [[3.0] * 3]]], results
  end

  def test_sharded_training_follows_one_process
    results = ranks(2) do |rank|
      plain, net = tower, tower
      net.layers.each { |layer| FSDP.fully_shard(layer) }
      FSDP.fully_shard(net)
      held = net.parameters.sum { |each| each.to_local.numel }
      norms = []
      adam = ->(one) { Torch::Optim::Adam.new(one.parameters, lr: 0.01) }
      losses = follow(plain, net, rank, 2, 10, adam) do
        norms << [Utils.clip_grad_norm_(plain.parameters, 0.05).item,
          Utils.clip_grad_norm_(net.parameters, 0.05, process_group: Distributed.default_process_group).item]
      end
      full = FSDP.full_state_dict(net)
      names, expected = plain.state_dict.to_a.transpose
      {losses: losses, norms: norms.map { |one, other| (one - other).abs }.max, least_norm: norms.map(&:first).min,
       parameters: apart(expected, full.values_at(*names)), share: held.to_f / plain.parameters.sum(&:numel)}
    end
    results.each do |result|
      assert_operator result[:least_norm], :>, 0.05, "nothing was clipped"
      assert_in_delta 0.5, result[:share], 0.05
      result.values_at(:losses, :norms, :parameters).each { |difference| assert_operator difference, :<, TOLERANCE, results.to_s }
    end
  end

  def test_sharded_parameters_are_saved_and_loaded_whole
    results = ranks(2) do
      net = tower
      FSDP.fully_shard(net)
      state = tower.state_dict.transform_values { |tensor| tensor.cpu * 2 }
      FSDP.load_full_state_dict(net, state)
      full = FSDP.full_state_dict(net)
      shapes = FSDP.summon_full_params(net) { net.parameters.map(&:shape) }
      [apart(state.values, full.values_at(*state.keys)), shapes == tower.parameters.map(&:shape)]
    end
    assert_equal [[0.0, true]] * 2, results
  end

  # By tensor, list and piece; dtypes that NCCL has.
  def test_collectives
    results = ranks(2) do |rank|
      made = {}
      {float16: 1.5, bfloat16: 1.5, float32: 1.5, float64: 1.5, int32: 3, int64: 3, uint8: 3}.each do |dtype, value|
        tensor = filled(value * (rank + 1.0), 7).to(dtype: dtype)
        Distributed.all_reduce(tensor)
        made[dtype] = tensor.to(dtype: :float64).cpu.to_a.uniq
      end
      {max: :max, min: :min, product: :product, avg: :avg}.each do |name, op|
        made[name] = filled(rank + 2.0).tap { |tensor| Distributed.all_reduce(tensor, op: op) }.cpu.to_a.uniq
      end
      made[:broadcast] = filled(rank + 5.0).tap { |tensor| Distributed.broadcast(tensor, src: 1) }.cpu.to_a.uniq
      parts = Array.new(2) { filled(0.0, 3) }
      Distributed.all_gather(parts, filled(rank + 1.0, 3))
      made[:all_gather] = parts.map { |part| part.cpu.to_a.uniq }
      rows = filled(0.0, 6)
      Distributed.all_gather_into_tensor(rows, filled(rank + 1.0, 3))
      made[:into_tensor] = rows.cpu.to_a
      piece = filled(0.0, 3)
      Distributed.reduce_scatter_tensor(piece, Torch.arange(0, 6, dtype: :float32).to(DEVICE))
      made[:reduce_scatter] = piece.cpu.to_a
      come = filled(0.0, 4)
      Distributed.all_to_all_single(come, Torch.arange(0, 4, dtype: :float32).to(DEVICE) + 10 * rank)
      made[:all_to_all] = come.cpu.to_a
      made
    end
    results.each_with_index do |made, rank|
      %i[float16 bfloat16 float32 float64].each { |dtype| assert_equal [4.5], made[dtype], dtype }
      %i[int32 int64 uint8].each { |dtype| assert_equal [9.0], made[dtype], dtype }
      assert_equal [[3.0], [2.0], [6.0], [2.5]], made.values_at(:max, :min, :product, :avg)
      assert_equal [6.0], made[:broadcast]
      assert_equal [[1.0], [2.0]], made[:all_gather]
      assert_equal [1.0] * 3 + [2.0] * 3, made[:into_tensor]
      assert_equal [0, 1, 2].map { |i| 2.0 * (i + 3 * rank) }, made[:reduce_scatter]
      assert_equal [0, 1, 10, 11].map { |value| value + 2.0 * rank }, made[:all_to_all]
    end
  end

  # The sum over both ranks of the square of a sum: its gradient is four times the sum, on each.
  def test_collectives_with_a_gradient
    results = ranks(2) do |rank|
      x = filled(rank + 1.0).requires_grad!
      Distributed::NN.all_reduce(x).pow(2).sum.backward
      y = filled(rank + 1.0).requires_grad!
      parts = Distributed::NN.all_gather(y)
      (parts[0] * 2 + parts[1] * 5).sum.backward
      z = filled(rank + 1.0).requires_grad!
      Distributed::NN.broadcast(z, src: 1).sum.backward
      [x, y, z].map { |tensor| tensor.grad.cpu.to_a.uniq }
    end
    assert_equal [[[12.0], [4.0], [0.0]], [[12.0], [10.0], [2.0]]], results
  end

  # Normalized over the rows of both ranks: what one process with all of them has.
  def test_batch_normalization_over_all_ranks
    results = ranks(2) do |rank|
      plain = Torch::NN::BatchNorm1d.new(5).double.to(DEVICE)
      net = Torch::NN::SyncBatchNorm.new(5).double.to(DEVICE)
      x, = batch(1, 2)
      inputs = [x.clone.requires_grad!, share(x, rank).clone.requires_grad!]
      weights = values([6, 5], 9)
      whole, part = plain.call(inputs[0]), net.call(inputs[1])
      (whole * weights).sum.backward
      (part * share(weights, rank)).sum.backward
      apart([share(whole, rank), share(inputs[0].grad, rank), plain.running_mean, plain.running_var],
        [part, inputs[1].grad, net.running_mean, net.running_var])
    end
    results.each { |difference| assert_operator difference, :<, TOLERANCE }
  end

  # Backward on a GPU runs on threads of libtorch's own, where no Ruby can: said in words, and the process goes on.
  def test_segments_and_functions_in_ruby
    results = ranks(1) do
      layer = Torch::NN::Linear.new(5, 5).to(DEVICE)
      x = filled(1.0).requires_grad!
      said = failure { Torch::Utils::Checkpoint.checkpoint(layer, x).sum.backward }
      double = Class.new(Distributed::Function) do
        def self.forward(_context, x) = x * 2
        def self.backward(_context, grad) = grad * 2
      end
      refused = failure { double.apply(x).sum.backward }
      y = filled(1.0).requires_grad!
      (y * 3).sum.backward
      [said, refused, y.grad.cpu.to_a.uniq]
    end
    said, refused, gradient = results.first
    assert_equal [3.0], gradient
    assert_includes refused[1], "is on #{DEVICE}, where autograd runs backward on threads of its own"
    return assert_nil(said) if STAND_INS # they have no threads of libtorch's

    assert_match(/checkpointed segment is Ruby code, but libtorch called it on a thread of its own/, said[1])
  end

  # Rank 1 has an infinite gradient: both leave out that step.
  def test_scaled_losses
    results = ranks(2) do |rank|
      weight = Torch::NN::Parameter.new(filled(1.0))
      optimizer = Torch::Optim::SGD.new([weight], lr: 0.5)
      scaler = Distributed::GradScaler.new(init_scale: 8.0)
      Array.new(2) do |step|
        optimizer.zero_grad
        scaler.scale((weight * filled((step.zero? && rank == 1) ? Float::INFINITY : 1.0)).sum).backward
        scaler.step(optimizer)
        scaler.update
        [weight.detach.cpu.to_a.uniq, scaler.get_scale]
      end
    end
    assert_equal [[[[1.0], 4.0], [[0.5], 4.0]]] * 2, results
  end

  # What follows needs no group. Gradients are given by hand, since backward must not run in the process of the tests.
  def parameters
    [[17, 5], [1], [257]].each_with_index.map { |shape, index| Torch::NN::Parameter.new(values(shape, index)) }
  end

  def give(params, step)
    params.each_with_index { |param, index| param.grad = values(param.shape, 10 * step + index) * 0.1 }
  end

  def test_fused_optimizers_take_torch_rbs_steps
    {SGD: {lr: 0.05, momentum: 0.9}, Adam: {lr: 0.01}, AdamW: {lr: 0.01, weight_decay: 0.2}}.each do |name, options|
      plain, fused = parameters, parameters
      optimizers = [Torch::Optim.const_get(name).new(plain, **options), Distributed::Optim.const_get(:"Fused#{name}").new(fused, **options)]
      10.times do |step|
        [plain, fused].each { |params| give(params, step) }
        optimizers.each(&:step)
      end
      assert_operator apart(plain, fused), :<, TOLERANCE, name
      refute_in_delta 0.0, apart(parameters, fused), 0.01, name
    end
  end

  def test_gradients_are_clipped
    params = parameters
    give(params, 1)
    numbers = params.flat_map { |param| param.grad.cpu.flatten.to_a }
    norm = Math.sqrt(numbers.sum { |number| number * number })
    assert_in_delta norm, Utils.clip_grad_norm_(params, 0.5).item, TOLERANCE
    clipped = params.flat_map { |param| param.grad.cpu.flatten.to_a }
    numbers.zip(clipped) { |before, after| assert_in_delta before * 0.5 / (norm + 1e-6), after, TOLERANCE }
    Utils.clip_grad_value_(params, 0.001)
    assert_operator params.map { |param| param.grad.abs.max.item }.max, :<=, 0.001
  end
end
