# frozen_string_literal: true

require_relative "test_helper"

# Scaled losses: which steps are left out, and how the scale follows, alone and on several ranks.
class GradScalerTest < Minitest::Test
  Scaler = Torch::Distributed::GradScaler
  Optim = Torch::Optim

  def parameter(*values, dtype: :float32)
    Torch::NN::Parameter.new(Torch.tensor(values, dtype: :float64).to(dtype: dtype))
  end

  # As backward would leave it.
  def with_grad(param, *values)
    param.grad = Torch.tensor(values, dtype: :float64).to(dtype: param.dtype)
    param
  end

  def sgd(*params, **options)
    Optim::SGD.new(params, lr: 1.0, **options)
  end

  # In a process of its own, where backward may run.
  def aside
    Distributed.fork_world(1) { yield && nil }
  end

  def error(klass = Torch::Distributed::Error, &block)
    assert_raises(klass, &block).message
  end

  # A scaler after its first loss.
  def scaling(**options)
    Scaler.new(**options).tap { |scaler| scaler.scale(Torch.ones(1)) }
  end

  def test_a_training_step
    aside do
      [false, true].each do |fused|
        layers = Array.new(2) do
          Torch.manual_seed(2)
          Torch::NN::Linear.new(3, 2)
        end
        input = Torch.randn(4, 3)
        optimizers = layers.map { |layer| Optim::Adam.new(layer.parameters, lr: 0.1, fused: fused) }
        scaler = Scaler.new(init_scale: 1024)
        3.times do
          optimizers.each(&:zero_grad)
          layers[0].call(input).pow(2).mean.backward
          scaler.scale(layers[1].call(input).pow(2).mean).backward
          optimizers[0].step
          scaler.step(optimizers[1])
          scaler.update
          assert_equal(*layers.map { |layer| layer.parameters.map { |param| param.grad.to_a } })
          assert_equal(*layers.map { |layer| layer.parameters.map(&:to_a) })
        end
        assert_equal 1024.0, scaler.get_scale
      end
    end
  end

  def test_outputs_of_several_kinds
    scaler = Scaler.new(init_scale: 8)
    assert_equal 24.0, scaler.scale(Torch.tensor(3.0)).item
    first, (second, _) = scaler.scale([Torch.tensor(1.0), [Torch.tensor(2.0), Torch.tensor(4.0)]])
    assert_equal [8.0, 16.0], [first, second].map(&:item)
    assert_match(/expected a tensor or an Array of tensors, got 3/, error(ArgumentError) { scaler.scale(3) })
  end

  # One element among many, at the ends of vectors and of chunks.
  def test_each_element_is_looked_at
    %i[float32 float64 bfloat16].each do |dtype|
      [1, 7, 16, 33, 70_001].each do |count|
        [0, count / 2, count - 1].uniq.product([nil, Float::INFINITY, -Float::INFINITY, Float::NAN]) do |at, value|
          param = Torch::NN::Parameter.new(Torch.zeros(count, dtype: dtype))
          grad = Torch.ones(count) * 8
          grad[at] = value if value
          param.grad = grad.to(dtype: dtype)
          found = Torch::Distributed.send(:_unscale_gradients, [param], 0.25, nil)
          assert_equal value.nil?, found, "#{dtype}, #{value} at #{at} of #{count}"
          assert_equal [2.0], param.grad.float.to_a.uniq unless value
        end
      end
    end
  end

  def test_huge_values_are_finite
    {float32: 3.0e38, float64: 1.0e300}.each do |dtype, huge|
      param = with_grad(parameter(*[0.0] * 100, dtype: dtype), *[huge, -huge] * 50)
      optimizer = sgd(param)
      scaling(init_scale: 2.0).step(optimizer)
      assert_in_delta huge / 2, param.to_a[1], huge * 1e-6
    end
  end

  def test_other_gradients
    transposed = Torch::NN::Parameter.new(Torch.zeros(2, 3))
    transposed.grad = Torch.ones(3, 2).t * 4
    complex = Torch::NN::Parameter.new(Torch.zeros(2).to(dtype: :complex64))
    complex.grad = Torch.complex(Torch.ones(2) * 3.0e38, Torch.ones(2) * 3.0e38)
    shared = with_grad(parameter(0.0), 4.0)
    empty = Torch::NN::Parameter.new(Torch.zeros(0))
    empty.grad = Torch.zeros(0)
    assert_equal true, Torch::Distributed.send(:_unscale_gradients, [transposed, complex, shared, shared, empty, parameter(1.0)], 0.25, nil)
    assert_equal [[1.0] * 3] * 2, transposed.grad.to_a
    assert_equal [1.0], shared.grad.to_a # once
    transposed.grad = (Torch.ones(3, 2) * Float::NAN).t
    assert_equal false, Torch::Distributed.send(:_unscale_gradients, [transposed], 0.25, nil)
    assert_nil Torch::Distributed.send(:_unscale_gradients, [parameter(1.0)], 0.25, nil)
  end

  def test_float16_is_refused
    param = with_grad(parameter(1.0, dtype: :float16), 1.0)
    assert_match(/float16 can't be unscaled/, error(Torch::Distributed::UnsupportedError) { scaling.unscale_(sgd(param)) })
  end

  def test_the_scale_follows
    param = with_grad(parameter(1.0), 0.0)
    optimizer = sgd(param)
    scaler = scaling(init_scale: 16, growth_factor: 3, backoff_factor: 0.25, growth_interval: 2)
    scales = [0.0, 0.0, 0.0, Float::INFINITY, 0.0, Float::NAN, 0.0, 0.0].map do |grad|
      with_grad(param, grad)
      scaler.step(optimizer)
      scaler.update
      scaler.get_scale
    end
    assert_equal [16.0, 48.0, 48.0, 12.0, 12.0, 3.0, 3.0, 9.0], scales
    assert_equal [1.0], param.to_a # what was not finite was left out
    scaler.update(5)
    assert_equal 5.0, scaler.get_scale
    scaler.update(Torch.tensor(7.0))
    assert_equal 7.0, scaler.get_scale
    # float32 is as far as it grows.
    scaler = scaling(init_scale: 2.0**127, growth_interval: 1)
    with_grad(param, 0.0)
    scaler.step(optimizer)
    scaler.update
    assert_equal 2.0**127, scaler.get_scale
  end

  def test_several_optimizers
    params = [with_grad(parameter(1.0), 4.0), with_grad(parameter(1.0), Float::INFINITY)]
    optimizers = params.map { |param| sgd(param) }
    scaler = scaling(init_scale: 4)
    scaler.unscale_(optimizers[0])
    assert_equal [1.0], params[0].grad.to_a
    optimizers.each { |optimizer| scaler.step(optimizer) }
    scaler.update
    assert_equal [[0.0], [1.0]], params.map(&:to_a)
    assert_equal 2.0, scaler.get_scale
  end

  def test_order_of_calls
    param = with_grad(parameter(1.0), 1.0)
    optimizer = sgd(param)
    scaler = Scaler.new
    assert_equal 65536.0, scaler.get_scale
    %i[unscale_ step].each { |name| assert_match(/#{name}: no loss has been scaled yet/, error { scaler.send(name, optimizer) }) }
    assert_match(/update: no loss has been scaled yet/, error { scaler.update })
    scaler.scale(Torch.ones(1))
    assert_match(/no gradients were unscaled/, error { scaler.update })
    scaler.unscale_(optimizer)
    assert_match(/unscale_: .*already since the last update/, error { scaler.unscale_(optimizer) })
    scaler.step(optimizer)
    assert_match(/unscale_: .*after step/, error { scaler.unscale_(optimizer) })
    assert_match(/step: .*already since the last update/, error { scaler.step(optimizer) })
    scaler.update
    with_grad(param, 1.0)
    scaler.step(optimizer)
    assert_match(/closure/, error { scaler.step(optimizer, -> { 1 }) })
    assert_match(/none of the optimizer's parameters has a gradient/, error { scaler.step(sgd(parameter(1.0))) })
  end

  def test_arguments
    {init_scale: [0, -1, nil, Float::NAN, "1"], growth_factor: [1, 0.5], backoff_factor: [1.0, 2, 0], growth_interval: [0, 1.5]}.each do |name, values|
      values.each { |value| assert_match(/#{name}: expected/, error(ArgumentError) { Scaler.new(name => value) }) }
    end
    assert_match(/new_scale: expected/, error(ArgumentError) { scaling.update(-1) })
  end

  def test_disabled
    param = with_grad(parameter(1.0), Float::INFINITY)
    scaler = Scaler.new(enabled: false)
    refute_predicate scaler, :enabled?
    assert_equal 3.0, scaler.scale(Torch.tensor(3.0)).item
    scaler.unscale_(sgd(param))
    assert_equal 9, scaler.step(sgd(param), -> { 9 })
    scaler.update
    assert_equal [-Float::INFINITY], param.to_a
    assert_equal [1.0, {}], [scaler.get_scale, scaler.state_dict]
    scaler.load_state_dict({})
  end

  def test_state
    param = with_grad(parameter(1.0), 0.0)
    scaler = scaling(init_scale: 16, growth_interval: 3)
    2.times do
      scaler.step(sgd(param))
      scaler.update
    end
    state = scaler.state_dict
    expected = {"scale" => 16.0, "growth_factor" => 2.0, "backoff_factor" => 0.5, "growth_interval" => 3, "_growth_tracker" => 2}
    assert_equal expected, state
    [Scaler.new, scaling].each do |other|
      other.load_state_dict(state)
      assert_equal expected, other.state_dict
      other.scale(Torch.ones(1))
      other.step(sgd(param))
      other.update
      assert_equal 32.0, other.get_scale
    end
    assert_match(/state is empty/, error { scaler.load_state_dict({}) })
  end

  def test_state_in_a_checkpoint
    Dir.mktmpdir do |folder|
      states = world(2) do
        saved = scaling(init_scale: 48, growth_interval: 7)
        Distributed::Checkpoint.save(folder, scaler: saved)
        loaded = Scaler.new
        Distributed::Checkpoint.load(folder, scaler: loaded)
        [saved.state_dict, loaded.state_dict]
      end
      states.flatten.each { |state| assert_equal states[0][0], state }
    end
  end

  (1..3).each do |size|
    define_method(:"test_all_of_#{size}_ranks_leave_out_the_same_steps") do
      results = world(size) do |rank|
        param = parameter(10.0)
        optimizer = sgd(param)
        scaler = scaling(init_scale: 8, growth_interval: 2)
        # In step s rank s finds something, in those after the last none does.
        Array.new(size + 3) do |step|
          with_grad(param, (step == rank) ? [Float::INFINITY, Float::NAN][step % 2] : 8.0 * (rank + 1))
          scaler.unscale_(optimizer) if step.odd?
          scaler.step(optimizer)
          scaler.update
          [param.item, scaler.get_scale]
        end
      end
      smallest = 8 * 0.5**size
      assert_equal [(1..size).map { |i| 8 * 0.5**i } + [smallest, smallest * 2, smallest * 2]], results.map { |steps| steps.map(&:last) }.uniq
      results.each_with_index do |steps, rank|
        assert_equal [10.0] * size, steps.first(size).map(&:first)
        assert_in_delta 10 - (8.0 * (rank + 1) / smallest) * 2 - 8.0 * (rank + 1) / (smallest * 2), steps.last[0], 1e-4
      end
    end
  end

  # One number travels in a step, and a rank may have no gradient.
  def test_ranks_of_a_group_and_ranks_without_gradients
    results = world(3) do |rank|
      pair = Distributed.new_group([0, 1])
      value = [4.0, nil, Float::INFINITY][rank]
      param = parameter(1.0)
      with_grad(param, value) if value
      scaler = scaling(init_scale: 4, process_group: pair)
      alone = pair == Distributed::GroupMember::NON_GROUP_MEMBER
      _, warning = capture_io { scaler.step(sgd(param)) }
      scaler.update
      [param.item, scaler.get_scale, alone, warning]
    end
    assert_equal [[0.0, 4.0, false, ""], [1.0, 4.0, false, ""], [1.0, 2.0, true, ""]], results
  end

  def test_under_data_parallel
    results = world(2) do |rank|
      Torch.manual_seed(3)
      net = Torch::NN::Linear.new(2, 1)
      model = Torch::NN::Parallel::DistributedDataParallel.new(net)
      optimizer = Optim::SGD.new(model.parameters, lr: 0.1, fused: true)
      scaler = Scaler.new(init_scale: 2.0**127)
      scales = Array.new(4) do
        optimizer.zero_grad
        scaler.scale(model.call(Torch.ones(3, 2) * (rank + 1)).pow(2).mean).backward
        scaler.step(optimizer)
        scaler.update
        scaler.get_scale
      end
      [scales, net.parameters.map(&:to_a)]
    end
    assert_equal results[0], results[1]
    assert_operator results[0][0].first, :<, 2.0**127 # the first steps overflow
    assert_equal results[0][0].min, results[0][0].last
    assert results[0][1].flatten.all?(&:finite?)
  end
end
