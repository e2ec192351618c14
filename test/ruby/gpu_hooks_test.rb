# frozen_string_literal: true

require_relative "on_gpu"
require "torch/nn/parallel/distributed_data_parallel"

# Communication hooks that run once backward has returned: those in Ruby, and PowerSGD.
class GPUHooksTest < Minitest::Test
  include OnGPU

  DDP = Torch::NN::Parallel::DistributedDataParallel
  Hooks = Distributed::Algorithms::DDPCommHooks
  TOLERANCE = 1e-10

  def net
    Torch.manual_seed(5)
    Torch::NN::Sequential.new(Torch::NN::Linear.new(7, 13), Torch::NN::Tanh.new, Torch::NN::Linear.new(13, 9), Torch::NN::Linear.new(9, 3))
      .double.to(DEVICE)
  end

  def input(rank, step)
    (Torch.arange(0, 35, dtype: :float64) * 0.731 + rank + step * 1.37).sin.reshape([5, 7]).to(DEVICE)
  end

  def gradients(model)
    model.parameters.map { |parameter| parameter.grad.detach.clone.cpu }
  end

  def apart(one, other)
    one.zip(other).map { |a, b| (a - b).abs.max.item }.max
  end

  # Trains a model with averages and one with the hook beside each other.
  #
  # @yieldparam model [DDP] which gets its hook
  # @return [Array<Float>] by step how far the gradients are apart
  def beside_averages(rank, steps: 4, backward: :backward.to_proc, **options)
    models = [DDP.new(net), DDP.new(net, bucket_cap_mb: 0.0002, **options)]
    yield models[1]
    optimizers = models.map { |model| Torch::Optim::SGD.new(model.parameters, lr: 0.1) }
    Array.new(steps) do |step|
      models.zip(optimizers) do |model, optimizer|
        optimizer.zero_grad
        backward.call(model.call(input(rank, step)).pow(2).mean)
      end
      apart(*models.map { |model| gradients(model) }).tap { optimizers.each(&:step) }
    end
  end

  KINDS = {
    work: ->(_, bucket) { Distributed.all_reduce(bucket.buffer, op: :avg, async_op: true) },
    tensor: ->(_, bucket) { Distributed.all_reduce(bucket.buffer / Distributed.get_world_size) },
    stages: lambda do |_, bucket|
      half = bucket.buffer / 2
      Distributed.all_reduce(half, async_op: true).get_future.then { |done| done.value.first * 2 / Distributed.get_world_size }
    end
  }.freeze

  def test_hooks_in_ruby_average
    KINDS.each do |name, hook|
      results = ranks(2) do |rank|
        here = Thread.current
        seen = []
        differences = beside_averages(rank) do |model|
          model.register_comm_hook(state: :mine) do |state, bucket|
            seen << [state, Thread.current.equal?(here), bucket.index, bucket.gradients.size, bucket.parameters.map(&:shape) == bucket.gradients.map(&:shape),
              Distributed._device_name(bucket.buffer.device)]
            hook.call(state, bucket)
          end
        end
        [differences, seen]
      end
      results.each do |differences, seen|
        differences.each { |difference| assert_operator difference, :<, TOLERANCE, name }
        assert_equal [[:mine, true, true, DEVICE]], seen.map { |call| call.values_at(0, 1, 4, 5) }.uniq
        assert_equal 4 * 6, seen.sum { |call| call[3] }
      end
      assert_equal results[0][1], results[1][1]
    end
  end

  def test_ways_to_run_backward_and_models
    several = ->(loss) { Distributed.send(:_backward, [loss], [Torch.ones_like(loss)]) }
    results = ranks(2) do |rank|
      hooked = ->(model) { model.register_comm_hook(hook: KINDS[:work]) }
      [beside_averages(rank, backward: several, &hooked), beside_averages(rank, find_unused_parameters: true, &hooked),
        beside_averages(rank, static_graph: true, &hooked), beside_averages(rank, gradient_as_bucket_view: false, &hooked)]
    end
    results.flatten.each { |difference| assert_operator difference, :<, TOLERANCE }
  end

  def test_what_a_hook_raises_comes_out_of_backward
    said = ranks(2) do |rank|
      model = DDP.new(net)
      model.register_comm_hook { raise IOError, "broken" }
      first = failure { model.call(input(rank, 0)).sum.backward }
      [first, failure { model.call(input(rank, 0)).sum.backward }]
    end
    said.each { |first, second| [first, second].each { |_, text| assert_match(/a communication hook raised IOError: broken/, text) } }
  end

  # The averages of two ranks' batches of one row have rank 2.
  def test_power_sgd_of_the_rank_that_gradients_have
    exact = {matrix_approximation_rank: 13, start_power_sgd_iter: 0, min_compression_rate: 0}
    forms = {
      "before it starts" => [:power_sgd, {start_power_sgd_iter: 4}], "full rank" => [:power_sgd, exact],
      "without error feedback and warm start" => [:power_sgd, {**exact, use_error_feedback: false, warm_start: false}],
      "nothing worth it" => [:power_sgd, {start_power_sgd_iter: 0, min_compression_rate: 100}],
      "batched" => [:batched_power_sgd, {**exact, matrix_approximation_rank: 20}]
    }
    forms.each do |name, (hook, options)|
      results = ranks(2) { |rank| beside_averages(rank) { |model| model.register_comm_hook(hook, state: Hooks::PowerSGDState.new(**options)) } }
      results.flatten.each { |difference| assert_operator difference, :<, 1e-8, name }
    end
  end

  # The same gradients again and again: what one step leaves out the later ones add, so that their mean approaches the average.
  def test_power_sgd_feeds_errors_back
    results = ranks(2) do |rank|
      models = [DDP.new(net), DDP.new(net)]
      models[1].register_comm_hook(:power_sgd, state: Hooks::PowerSGDState.new(start_power_sgd_iter: 0, min_compression_rate: 0))
      sums = nil
      first = nil
      60.times do |i|
        models.each do |model|
          model.zero_grad
          model.call(input(rank, 0)).pow(2).mean.backward
        end
        found = gradients(models[1])
        first ||= found
        sums = i.zero? ? found : sums.zip(found).map { |sum, more| sum + more }
      end
      expected = gradients(models[0])
      [apart(expected, first), apart(expected, sums.map { |sum| sum / 60 }), sums.map { |sum| sum.flatten.to_a }]
    end
    results.each do |once, mean, _|
      assert_operator once, :>, 1e-4
      assert_operator mean, :<, once / 4
    end
    assert_equal results[0][2], results[1][2]
  end

  def test_power_sgd_after_a_gradient_that_is_not_finite
    results = ranks(2) do |rank|
      model = DDP.new(net)
      model.register_comm_hook(Hooks.bf16_compress_wrapper(Hooks.power_sgd_hook),
        state: Hooks::PowerSGDState.new(matrix_approximation_rank: 2, start_power_sgd_iter: 0, min_compression_rate: 0))
      Array.new(3) do |step|
        model.zero_grad
        loss = model.call(input(rank, 0)).pow(2).mean
        ((step == 1 && rank == 1) ? loss * Float::INFINITY : loss).backward
        gradients(model).map { |gradient| gradient.sum.item.finite? }
      end
    end
    assert_equal [[[true] * 6, [false] * 6, [true] * 6]] * 2, results
  end
end
