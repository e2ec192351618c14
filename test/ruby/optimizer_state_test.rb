# frozen_string_literal: true

require_relative "test_helper"

class OptimizerStateTest < Minitest::Test
  # Each of torch-rb's, in the forms that keep different things.
  OPTIMIZERS = {
    adadelta: ->(params) { Torch::Optim::Adadelta.new(params, lr: 0.5) },
    adagrad: ->(params) { Torch::Optim::Adagrad.new(params, lr: 0.05, lr_decay: 0.01, initial_accumulator_value: 0.1) },
    adam: ->(params) { Torch::Optim::Adam.new(params, lr: 0.01, weight_decay: 0.01) },
    adam_amsgrad: ->(params) { Torch::Optim::Adam.new(params, lr: 0.01, betas: [0.8, 0.99], amsgrad: true) },
    adamax: ->(params) { Torch::Optim::Adamax.new(params, lr: 0.02) },
    adamw: ->(params) { Torch::Optim::AdamW.new(params, lr: 0.01) },
    asgd: ->(params) { Torch::Optim::ASGD.new(params, lr: 0.05, t0: 2.0) },
    rmsprop: ->(params) { Torch::Optim::RMSprop.new(params, lr: 0.01) },
    rmsprop_all: ->(params) { Torch::Optim::RMSprop.new(params, lr: 0.01, momentum: 0.9, centered: true) },
    rprop: ->(params) { Torch::Optim::Rprop.new(params, lr: 0.01) },
    sgd: ->(params) { Torch::Optim::SGD.new(params, lr: 0.1) },
    sgd_momentum: ->(params) { Torch::Optim::SGD.new(params, lr: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.01) },
    groups: lambda { |params|
      Torch::Optim::AdamW.new([{params: params.first(1), lr: 0.1}, {params: params.drop(1), weight_decay: 0.5}], lr: 0.01)
    }
  }.freeze

  SHAPES = [[3, 2], [5], []].freeze

  def parameters(from = nil)
    Torch.manual_seed(1) unless from
    SHAPES.each_with_index.map { |shape, i| Torch::NN::Parameter.new(from ? from[i].detach.clone : Torch.randn(shape)) }
  end

  # Steps of a kind of training whose gradients depend on nothing but the step. The last parameter has none in the first one.
  def train(optimizer, params, steps)
    steps.each do |step|
      params.each_with_index do |param, i|
        next if step.zero? && i == 2

        Torch.manual_seed(100 * step + i)
        param.grad = Torch.randn(param.shape)
      end
      optimizer.step
    end
  end

  # A copy, as a checkpoint would have it.
  def copied(state)
    case state
    when Torch::Tensor then state.detach.clone
    when Hash then state.to_h { |key, value| [key, copied(value)] }
    when Array then state.map { |value| copied(value) }
    else state
    end
  end

  def values(params)
    params.map { |param| param.detach.to_a }
  end

  OPTIMIZERS.each do |name, make|
    define_method(:"test_#{name}_goes_on_bit_for_bit") do
      params = parameters
      optimizer = make.call(params)
      train(optimizer, params, 0...1)
      early = [parameters(params), copied(optimizer.state_dict)]
      train(optimizer, params, 1...4)
      later = [parameters(params), copied(optimizer.state_dict)]
      train(optimizer, params, 4...8)
      [[early, 1], [later, 4]].each do |(copy, state), step|
        resumed = make.call(copy)
        resumed.param_groups.each { |group| group[:lr] = 77.0 }
        assert_nil resumed.load_state_dict(state)
        assert_equal copied_values(state), copied_values(resumed.state_dict)
        train(resumed, copy, step...8)
        assert_equal values(params), values(copy)
      end
    end

    define_method(:"test_#{name}_takes_over_in_place_what_is_there") do
      params = parameters
      optimizer = make.call(params)
      train(optimizer, params, 0...3)
      start = parameters(params)
      state = copied(optimizer.state_dict)
      train(optimizer, params, 3...6)
      expected = values(params)
      memories = tensors(optimizer.state_dict["state"]).map(&:object_id)
      params.zip(start) { |param, before| Torch.no_grad { param.copy!(before) } }
      optimizer.load_state_dict(state)
      assert_equal memories, tensors(optimizer.state_dict["state"]).map(&:object_id)
      train(optimizer, params, 3...6)
      assert_equal expected, values(params)
    end
  end

  def tensors(state)
    state.values.flat_map(&:values).grep(Torch::Tensor)
  end

  def copied_values(state)
    case state
    when Torch::Tensor then [state.dtype, state.to_a]
    when Hash then state.to_h { |key, value| [key, copied_values(value)] }
    when Array then state.map { |value| copied_values(value) }
    else state
    end
  end

  # The fused ones keep the same under the same keys.
  {sgd: ["SGD", {lr: 0.1, momentum: 0.9}], adam: ["Adam", {lr: 0.01, amsgrad: true}], adamw: ["AdamW", {lr: 0.01}]}.each do |name, (kind, options)|
    define_method(:"test_fused_#{name}_takes_over_from_the_plain_one_and_gives_back") do
      make = ->(params, fused) { Torch::Optim.const_get(kind).new(params, **options, fused: fused) }
      params = parameters
      train(plain = make.call(params, false), params, 0...3)
      fused_params = parameters(params)
      fused = make.call(fused_params, true)
      assert_equal "Torch::Distributed::Optim::Fused#{kind}", fused.class.name
      fused.load_state_dict(copied(plain.state_dict))
      assert_equal copied_values(plain.state_dict), copied_values(fused.state_dict)

      train(fused, fused_params, 3...5)
      start = parameters(fused_params)
      state = copied(fused.state_dict)
      train(fused, fused_params, 5...8)
      expected = values(fused_params)
      # Bit for bit in a fresh one, and in the one that was there.
      fresh = make.call(fresh_params = parameters(start), true)
      Torch.no_grad { fused_params.zip(start) { |param, before| param.copy!(before) } }
      {fresh => fresh_params, fused => fused_params}.each do |resumed, its_params|
        resumed.load_state_dict(state)
        train(resumed, its_params, 5...8)
        assert_equal expected, values(its_params)
      end
      # The plain ones round otherwise.
      back = make.call(back_params = parameters(start), false)
      back.load_state_dict(state)
      train(back, back_params, 5...8)
      fresh_params.zip(back_params) { |one, other| assert Torch.allclose(one.detach, other.detach, rtol: 1e-4, atol: 1e-6) }
    end
  end

  def test_the_form_is_that_of_pytorch
    params = parameters
    optimizer = OPTIMIZERS[:groups].call(params)
    train(optimizer, params, 0...1)
    state = optimizer.state_dict
    assert_equal %w[state param_groups], state.keys
    assert_equal [0, 1], state["state"].keys
    assert_equal %w[step exp_avg exp_avg_sq], state["state"][0].keys
    assert_equal 1, state["state"][0]["step"]
    assert_equal [3, 2], state["state"][0]["exp_avg"].shape
    assert_equal({"params" => [0], "lr" => 0.1, "betas" => [0.9, 0.999], "eps" => 1e-8, "weight_decay" => 0.01, "amsgrad" => false},
      state["param_groups"][0])
    assert_equal [1, 2], state["param_groups"][1]["params"]
    assert_equal 0.5, state["param_groups"][1]["weight_decay"]
  end

  # PyTorch's newer optimizers count in tensors and have options that torch-rb does not know.
  def test_what_pytorch_saved_is_understood
    params = parameters
    train(own = OPTIMIZERS[:adam].call(params), params, 0...3)
    copy = parameters(params)
    state = copied(own.state_dict)
    state["state"].each_value { |kept| kept["step"] = Torch.tensor(kept["step"], dtype: :float32) }
    state["param_groups"][0].merge!("maximize" => false, "foreach" => nil, "capturable" => false, "fused" => nil)
    train(resumed = OPTIMIZERS[:adam].call(copy), copy, 0...0)
    resumed.load_state_dict(state)
    assert_equal [3, Integer], resumed.instance_variable_get(:@state)[copy[0]].then { |kept| [kept[:step], kept[:step].class] }
    assert_equal %i[params lr betas eps weight_decay amsgrad].sort, resumed.param_groups[0].keys.sort
    train(own, params, 3...5)
    train(resumed, copy, 3...5)
    assert_equal values(params), values(copy)

    sgd = OPTIMIZERS[:sgd_momentum].call(copy)
    sgd.load_state_dict("state" => {0 => {"momentum_buffer" => nil}}, "param_groups" => [{"lr" => 0.5, "params" => [0, 1, 2]}])
    assert_equal 0.5, sgd.param_groups[0][:lr]
    train(sgd, copy, 0...2)
  end

  def test_state_has_the_dtype_of_its_parameter_and_is_a_copy
    wide = SHAPES.map { |shape| Torch::NN::Parameter.new(Torch.randn(shape).double) }
    optimizer = OPTIMIZERS[:sgd_momentum].call(params = parameters)
    train(optimizer, params, 1...2)
    state = optimizer.state_dict
    other = OPTIMIZERS[:sgd_momentum].call(wide)
    other.load_state_dict(state)
    buffer = other.state_dict["state"][0]["momentum_buffer"]
    assert_equal [:float64, [3, 2]], [buffer.dtype, buffer.shape]
    assert_equal state["state"][0]["momentum_buffer"].double.to_a, buffer.to_a
    again = OPTIMIZERS[:sgd_momentum].call(parameters)
    again.load_state_dict(state)
    before = state["state"][0]["momentum_buffer"].to_a
    Torch.no_grad { again.state_dict["state"][0]["momentum_buffer"].fill!(9) }
    assert_equal before, state["state"][0]["momentum_buffer"].to_a
  end

  def test_what_does_not_fit_is_told_and_changes_nothing
    params = parameters
    optimizer = OPTIMIZERS[:adam].call(params)
    train(optimizer, params, 0...2)
    good = copied(optimizer.state_dict)
    change = ->(&block) { copied(good).tap(&block) }
    {
      /expected a Hash with "state" and "param_groups".* got one with \["model"\]/ => {"model" => 1},
      /expected a Hash .* got Array/ => [],
      /expected 1 parameter group, as this Torch::Optim::Adam has, got 2/ => change.call { |state| state["param_groups"] *= 2 },
      /expected 3 parameters in group 0.* got 2/ => change.call { |state| state["param_groups"][0]["params"] = [0, 1] },
      /expected exp_avg of parameter 1 in its shape \[5\], got \[6\]/ => change.call { |state| state["state"][1]["exp_avg"] = Torch.zeros(6) },
      /there is state of \[7\], but its groups have the parameters \[0, 1, 2\]/ => change.call { |state| state["state"][7] = {} },
      /trained with maximize, which Torch::Optim::Adam does not know/ => change.call { |state| state["param_groups"][0]["maximize"] = true },
      /the state of parameter 2 lacks exp_avg_sq: expected what a Torch::Optim::Adam saved, got step, exp_avg/ =>
        change.call { |state| state["state"][2].delete("exp_avg_sq") },
      /lacks max_exp_avg_sq/ => change.call { |state| state["param_groups"][0]["amsgrad"] = true }
    }.each do |text, state|
      error = failure { optimizer.load_state_dict(state) }
      assert_equal "ArgumentError", error&.first
      assert_match text, error.last
      assert_equal copied_values(good), copied_values(optimizer.state_dict)
    end
    assert_match(/state of parameter 0 lacks square_avg, acc_delta/,
      failure { OPTIMIZERS[:adadelta].call(parameters).load_state_dict(good) }.last)
  end

  SCHEDULERS = {
    step: ->(optimizer) { Torch::Optim::LRScheduler::StepLR.new(optimizer, step_size: 2, gamma: 0.5) },
    multi_step: ->(optimizer) { Torch::Optim::LRScheduler::MultiStepLR.new(optimizer, [2, 5], gamma: 0.5) },
    exponential: ->(optimizer) { Torch::Optim::LRScheduler::ExponentialLR.new(optimizer, 0.9) },
    cosine: ->(optimizer) { Torch::Optim::LRScheduler::CosineAnnealingLR.new(optimizer, 4, eta_min: 0.001) },
    lambda: ->(optimizer) { Torch::Optim::LRScheduler::LambdaLR.new(optimizer, ->(epoch) { 0.95**epoch }) },
    multiplicative: ->(optimizer) { Torch::Optim::LRScheduler::MultiplicativeLR.new(optimizer, ->(_) { 0.8 }) }
  }.freeze

  SCHEDULERS.each do |name, make|
    define_method(:"test_scheduler_#{name}_goes_on") do
      rates = lambda do |optimizer, scheduler, steps|
        Array.new(steps) do
          scheduler.step
          optimizer.param_groups.map { |group| group[:lr] }
        end
      end
      optimizer = OPTIMIZERS[:groups].call(parameters)
      scheduler = make.call(optimizer)
      rates.call(optimizer, scheduler, 3)
      state = scheduler.state_dict
      saved = optimizer.state_dict
      expected = rates.call(optimizer, scheduler, 6)
      assert_equal [3, 4, [0.1, 0.01]], state.values_at("last_epoch", "_step_count", "base_lrs")
      refute state.key?("lr_lambdas")

      resumed = OPTIMIZERS[:groups].call(parameters)
      other = make.call(resumed)
      other.load_state_dict(state)
      resumed.load_state_dict(saved)
      assert_equal expected, rates.call(resumed, other, 6)
    end
  end

  def test_scheduler_refuses_what_is_not_its_own
    scheduler = SCHEDULERS[:step].call(OPTIMIZERS[:sgd].call(parameters))
    assert_match(/expected a Hash with "last_epoch".* got one with \["gamma"\]/, failure { scheduler.load_state_dict("gamma" => 1) }.last)
    other = SCHEDULERS[:exponential].call(OPTIMIZERS[:sgd].call(parameters)).state_dict
    assert_match(/expected one of .*StepLR, but it lacks step_size/, failure { scheduler.load_state_dict(other) }.last)
    two = SCHEDULERS[:step].call(OPTIMIZERS[:groups].call(parameters)).state_dict
    assert_match(/expected base_lrs of 1 parameter groups, got \[0.1, 0.01\]/, failure { scheduler.load_state_dict(two) }.last)
  end
end
