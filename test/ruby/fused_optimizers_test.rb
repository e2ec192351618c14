# frozen_string_literal: true

require_relative "test_helper"

# Gradients are given by hand, so that no autograd runs in this process.
class FusedOptimizersTest < Minitest::Test
  Optim = Torch::Optim
  Fused = Distributed::Optim
  SHAPES = [[17, 5], [1], [257], [3, 7, 2], [64, 65], [0]].freeze
  OPTIONS = {
    SGD: [{lr: 0.05}, {lr: 0.05, weight_decay: 0.02}, {lr: 0.05, momentum: 0.9},
      {lr: 0.05, momentum: 0.8, dampening: 0.3, weight_decay: 0.01}, {lr: 0.02, momentum: 0.9, nesterov: true, weight_decay: 0.01}],
    Adam: [{}, {lr: 0.01, betas: [0.8, 0.95], eps: 1e-6, weight_decay: 0.1}, {lr: 0.01, amsgrad: true}],
    AdamW: [{}, {lr: 0.01, weight_decay: 0.2}, {lr: 0.01, amsgrad: true, betas: [0.7, 0.9]}]
  }.freeze

  def parameters(dtype = :float32)
    SHAPES.each_with_index.map do |shape, index|
      count = shape.inject(:*)
      values = (Torch.arange(0, count, dtype: :float64) * 0.7391 + index).sin.reshape(shape)
      Torch::NN::Parameter.new(values.to(dtype: dtype))
    end
  end

  def give(params, step)
    params.each_with_index do |param, index|
      values = Torch.arange(0, param.numel, dtype: :float64)
      param.grad = ((values * 0.317 + 13 * step + index).cos * 0.1).reshape(param.shape).to(dtype: param.dtype)
    end
  end

  def numbers(params)
    params.flat_map { |param| param.detach.to(dtype: :float64).to_a.flatten }
  end

  def assert_near(expected, got, tolerance)
    size = Math.sqrt(expected.sum { |value| value * value })
    apart = Math.sqrt(expected.zip(got).sum { |one, other| (one - other)**2 })
    assert_operator apart, :<=, tolerance * size
  end

  # Both take the same steps; `each` may change things on the way.
  def run_both(name, options, dtype: :float32, steps: 100)
    plain = parameters(dtype)
    fused = parameters(dtype)
    optimizers = [Optim.const_get(name).new(plain, **options), Fused.const_get(:"Fused#{name}").new(fused, **options)]
    steps.times do |step|
      [plain, fused].each { |params| give(params, step) }
      optimizers.each { |optimizer| yield optimizer, step } if block_given?
      optimizers.each(&:step)
    end
    [plain, fused, *optimizers]
  end

  # Whatever the number of parameters, and with no call of a tensor's.
  def test_a_step_is_one_call
    {SGD: :_sgd_step, Adam: :_adam_step, AdamW: :_adam_step}.each do |name, step|
      params = parameters
      optimizer = Optim.const_get(name).new(params, lr: 0.1, fused: true)
      give(params, 0)
      calls = []
      trace = TracePoint.new(:c_call) { |call| calls << call.method_id if call.defined_class == Torch::Tensor || call.method_id.end_with?("_step") }
      trace.enable { optimizer.step }
      assert_equal [step], calls, name
    end
  end

  OPTIONS.each do |name, choices|
    {float32: 1e-6, float64: 1e-12}.each do |dtype, tolerance|
      define_method(:"test_#{name.downcase}_takes_torch_rbs_steps_in_#{dtype}") do
        choices.each do |options|
          plain, fused = run_both(name, options, dtype: dtype)
          assert_near numbers(plain), numbers(fused), tolerance
          refute_equal numbers(parameters(dtype)), numbers(fused)
        end
      end
    end

    define_method(:"test_#{name.downcase}_in_half_precision_is_nearer_to_the_truth") do
      options = choices.last
      exact = run_both(name, options, dtype: :float64, steps: 10)[1]
      %i[float16 bfloat16].each do |dtype|
        fused = parameters(dtype)
        optimizer = Fused.const_get(:"Fused#{name}").new(fused, **options)
        10.times do |step|
          give(fused, step)
          optimizer.step
        end
        assert_near numbers(exact), numbers(fused), (dtype == :float16) ? 0.02 : 0.1
      end
    end
  end

  def test_state_has_torch_rbs_keys_and_numbers
    {SGD: {lr: 0.1, momentum: 0.9}, Adam: {}, AdamW: {amsgrad: true}}.each do |name, options|
      plain, fused, optimizer, ours = run_both(name, options, steps: 3)
      states = [optimizer, ours].map { |each| each.instance_variable_get(:@state) }
      plain.zip(fused) do |one, other|
        assert_equal states[0].fetch(one).keys, states[1].fetch(other).keys
        states[0].fetch(one).each do |key, value|
          mine = states[1].fetch(other).fetch(key)
          next assert_equal(value, mine) unless value.is_a?(Torch::Tensor)

          assert_near value.to_a.flatten, mine.to_a.flatten, 1e-6 if value.numel.positive?
          refute mine.requires_grad
        end
      end
    end
    without = run_both(:SGD, {lr: 0.1}, steps: 1).last
    assert_empty without.instance_variable_get(:@state)
  end

  def test_a_state_moves_between_the_two
    OPTIONS.each do |name, choices|
      options = choices.last
      straight, = run_both(name, options, steps: 8)
      [[name, :"Fused#{name}"], [:"Fused#{name}", name]].each do |kinds|
        params = parameters
        saved = nil
        kinds.each_with_index do |kind, part|
          optimizer = ((kind == name) ? Optim : Fused).const_get(kind).new(params, **options)
          optimizer.load_state_dict(saved) if saved
          4.times do |step|
            give(params, 4 * part + step)
            optimizer.step
          end
          saved = optimizer.state_dict
        end
        assert_near numbers(straight), numbers(params), 1e-6
      end
    end
  end

  def test_what_is_changed_between_steps_counts
    plain, fused, = run_both(:SGD, {lr: 0.1, momentum: 0.9}, steps: 12) do |optimizer, step|
      group = optimizer.param_groups[0]
      group[:lr] = 0.1 / (step + 1)
      group[:momentum] = 0.5 if step == 3
      group[:params] = group[:params].reverse if step == 4
      optimizer.instance_variable_get(:@state).delete(group[:params][1]) if step == 5
      optimizer.instance_variable_set(:@state, Hash.new { |hash, key| hash[key] = {} }) if step == 7
      group[:params] = group[:params].first(3) if step == 8
    end
    assert_near numbers(plain), numbers(fused), 1e-6
  end

  def test_schedulers_and_groups
    results = [Optim::Adam, Fused::FusedAdam].map do |kind|
      params = parameters
      optimizer = kind.new([{params: params.first(2), lr: 0.1}, {params: params.drop(2), weight_decay: 0.5}], lr: 0.01)
      scheduler = Optim::LRScheduler::StepLR.new(optimizer, step_size: 2, gamma: 0.5)
      6.times do |step|
        give(params, step)
        optimizer.step
        scheduler.step
      end
      numbers(params)
    end
    assert_near results[0], results[1], 1e-6
  end

  def test_parameters_without_a_gradient_are_passed_over
    params = parameters
    give(params, 0)
    lone = Torch::NN::Parameter.new(Torch.ones(3))
    optimizer = Fused::FusedAdam.new([lone, *params], weight_decay: 0.5)
    optimizer.step
    assert_equal [1.0] * 3, lone.detach.to_a
    refute optimizer.instance_variable_get(:@state).key?(lone)
    assert_equal 1, optimizer.instance_variable_get(:@state).fetch(params[0])[:step]
  end

  def test_gradients_stay_as_they_are
    params = parameters
    give(params, 0)
    before = params.map { |param| param.grad.to_a }
    Fused::FusedSGD.new(params, lr: 0.1, weight_decay: 0.5, momentum: 0.9, nesterov: true).step
    Fused::FusedAdam.new(params, weight_decay: 0.5).step
    assert_equal before, params.map { |param| param.grad.to_a }
  end

  def test_closures_return_the_loss
    params = parameters
    give(params, 0)
    before = numbers(params)
    assert_equal :loss, Fused::FusedSGD.new(params, lr: 0.1).step(-> { :loss })
    assert_nil Fused::FusedSGD.new(params, lr: 0.1).step
    refute_equal before, numbers(params)
  end

  def test_zero_grad_forgets_or_zeroes
    params = parameters
    optimizer = Fused::FusedSGD.new(params, lr: 0.1)
    give(params, 0)
    held = params[0].grad
    optimizer.zero_grad(set_to_none: false)
    assert_equal [0.0], held.to_a.flatten.uniq
    assert_equal [0.0], params[0].grad.to_a.flatten.uniq
    optimizer.zero_grad
    assert_equal [nil], params.map(&:grad).uniq
    optimizer.zero_grad(set_to_none: false)
    optimizer.step
  end

  def test_fused_is_an_argument_of_torch_rbs_own
    {SGD: {lr: 0.1}, Adam: {}, AdamW: {lr: 0.1}}.each do |name, options|
      kind = Optim.const_get(name)
      fused = Fused.const_get(:"Fused#{name}")
      assert_instance_of fused, kind.new(parameters, fused: true, **options)
      assert_instance_of kind, kind.new(parameters, fused: false, **options)
      assert_instance_of kind, kind.new(parameters, fused: nil, **options)
      assert_instance_of kind, kind.new(parameters, **options)
      assert_instance_of fused, fused.new(parameters, fused: true, **options)
      assert_operator fused, :<, kind
      error = assert_raises(ArgumentError) { kind.new(parameters, fused: 1, **options) }
      assert_equal "fused: expected true or false, got 1", error.message
      refute kind.new(parameters, fused: true, **options).param_groups[0].key?(:fused)
    end
    derived = Class.new(Optim::SGD) { def initialize(params, fused:) = super(params, lr: fused) }
    assert_equal 0.25, derived.new(parameters, fused: 0.25).param_groups[0][:lr]
    assert_raises(ArgumentError) { Optim::SGD.new(parameters, lr: -1, fused: true) }
  end

  def test_what_cannot_be_stepped_changes_nothing
    params = parameters
    give(params, 0)
    before = numbers(params)
    optimizer = Fused::FusedAdam.new(params)
    optimizer.instance_variable_get(:@state)[params[4]] = {step: 3, exp_avg: Torch.zeros(2), exp_avg_sq: Torch.zeros(64, 65)}
    error = assert_raises(Distributed::InvalidArgumentError) { optimizer.step }
    assert_includes error.message, "parameter number 4 of the step: its state has another shape"
    assert_equal before, numbers(params)
    assert_equal [0, 3], [params[0], params[4]].map { |param| optimizer.instance_variable_get(:@state)[param][:step] }

    sgd = Fused::FusedSGD.new(params, lr: 0.1, momentum: 0.9)
    sgd.instance_variable_get(:@state)[params[4]] = {momentum_buffer: Torch.zeros(2)}
    assert_raises(Distributed::InvalidArgumentError) { sgd.step }
    assert_empty sgd.instance_variable_get(:@state)[params[0]]
    sgd.param_groups[0].delete(:lr)
    assert_includes assert_raises(KeyError) { sgd.step }.message, "a group has no :lr"
    sgd.param_groups[0][:params] = [1]
    sgd.param_groups[0][:lr] = 0.1
    assert_raises(TypeError) { sgd.step }
    assert_equal before, numbers(params)
  end

  # Backward, which may not run in the process of the tests.
  def test_training_with_sparse_gradients_and_autograd
    out, err, status = ruby(<<~'RUBY')
      def net = (Torch.manual_seed(3); Torch::NN::Embedding.new(7, 3, sparse: true))
      def run(optimizer, model)
        5.times do |step|
          optimizer.zero_grad
          model.call(Torch.tensor([1, step, 1])).pow(2).sum.backward
          optimizer.step
        end
        model.weight.detach.to_a
      end
      one = net
      other = net
      plain = run(Torch::Optim::SGD.new(one.parameters, lr: 0.1), one)
      p plain.flatten.zip(run(Torch::Optim::SGD.new(other.parameters, lr: 0.1, fused: true), other).flatten).all? { |a, b| (a - b).abs < 1e-6 }
      [Torch::Optim::Adam, Torch::Optim::AdamW].each do |kind|
        run(kind.new(other.parameters, fused: true), other)
      rescue Torch::Error => e
        puts e.message[/\A.*instead/]
      end
      weight = Torch::NN::Parameter.new(Torch.ones(2))
      loss = (weight * weight).sum
      weight.grad = Torch.ones(2)
      Torch::Optim::SGD.new([weight], lr: 0.1, fused: true).step
      begin
        loss.backward
      rescue => e
        puts e.message[/modified by an inplace operation/]
      end
    RUBY
    assert status.success?, err
    assert_equal ["true", "Adam does not support sparse gradients, please consider SparseAdam instead",
      "AdamW does not support sparse gradients, please consider SparseAdam instead", "modified by an inplace operation"], out.lines.map(&:chomp)
  end

  def test_under_distributed_data_parallel
    results = world(2) do |rank|
      [false, true].map do |fused|
        Torch.manual_seed(1)
        net = Torch::NN::Sequential.new(Torch::NN::Linear.new(5, 7), Torch::NN::Tanh.new, Torch::NN::Linear.new(7, 3))
        model = Torch::NN::Parallel::DistributedDataParallel.new(net)
        optimizer = Optim::Adam.new(model.parameters, lr: 0.01, fused: fused)
        inputs = Torch.randn(10, 4, 5)
        10.times do |step|
          optimizer.zero_grad
          model.call(inputs[step] + rank).pow(2).mean.backward
          optimizer.step
        end
        numbers(model.parameters)
      end
    end
    assert_equal results[0], results[1]
    assert_near results[0][0], results[0][1], 1e-5
  end
end
