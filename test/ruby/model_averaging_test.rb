# frozen_string_literal: true

require_relative "test_helper"

class ModelAveragingTest < Minitest::Test
  ModelAveraging = Torch::Distributed::Algorithms::ModelAveraging
  PeriodicModelAverager = ModelAveraging::PeriodicModelAverager
  PostLocalSGDOptimizer = Torch::Distributed::Optim::PostLocalSGDOptimizer

  def parameter(value, dtype: :float32, shape: [3], grad: true)
    Torch::NN::Parameter.new(Torch.full(shape, value, dtype: dtype)).tap do |made|
      made.grad = Torch.zeros_like(made) if grad
    end
  end

  def test_parameters_with_gradients_become_means
    results = world(3) do |rank|
      params = [parameter(rank + 1.0), parameter(rank * 3.0, dtype: :float64, shape: [2, 5]), parameter(rank.to_f, grad: false)]
      ModelAveraging.average_parameters(params)
      transposed = Torch::NN::Parameter.new(Torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t * (rank + 1))
      transposed.grad = Torch.zeros(2, 2)
      ModelAveraging.average_parameters([{params: [transposed], lr: 1}])
      params.map { |each| each.detach.to_a.flatten.uniq } << transposed.detach.to_a
    end
    results.each_with_index do |(first, second, left, transposed), rank|
      assert_equal [[2.0], [3.0], [rank.to_f], [[2.0, 6.0], [4.0, 8.0]]], [first, second, left, transposed]
    end
  end

  def test_the_period_begins_after_the_warmup
    results = world(2) do |rank|
      averager = PeriodicModelAverager.new(period: 2, warmup_steps: 3)
      weight = parameter(0.0)
      7.times.map do
        Torch.no_grad { weight.fill!(rank) }
        averager.average_parameters([weight])
        weight[0].item
      end << averager.step
    end
    assert_equal [0.0, 0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 7], results[0]
    assert_equal [1.0, 1.0, 1.0, 0.5, 1.0, 0.5, 1.0, 7], results[1]
  end

  def test_an_optimizer_whose_steps_are_followed_by_averaging
    results = world(2) do |rank|
      weight = parameter(0.0)
      plain = Torch::Optim::SGD.new([weight], lr: 1)
      optimizer = PostLocalSGDOptimizer.new(plain, PeriodicModelAverager.new(period: 2, warmup_steps: 1))
      values = 4.times.map do
        optimizer.zero_grad
        (weight * (rank + 1)).sum.backward
        optimizer.step
        weight[0].item
      end
      scheduler = Torch::Optim::LRScheduler::StepLR.new(optimizer, step_size: 1, gamma: 0.5)
      scheduler.step
      [values, optimizer.param_groups.equal?(plain.param_groups), plain.param_groups[0][:lr], optimizer.is_a?(Torch::Optim::Optimizer)]
    end
    # Steps of -1 and -2; averaged after the second and the fourth.
    assert_equal [[-1.0, -3.0, -4.0, -6.0], true, 0.5, true], results[0]
    assert_equal [[-2.0, -3.0, -5.0, -6.0], true, 0.5, true], results[1]
  end

  # Whatever the optimizer inside gives and takes.
  def test_its_state_has_the_averagers_count
    alone do
      plain = Class.new(Torch::Optim::SGD) do
        attr_reader :loaded

        def state_dict
          {"state" => {}, "param_groups" => [1]}
        end

        def load_state_dict(state)
          @loaded = state
        end
      end.new([parameter(0.0)], lr: 1)
      averager = PeriodicModelAverager.new(period: 3)
      optimizer = PostLocalSGDOptimizer.new(plain, averager)
      2.times { optimizer.step }
      assert_equal({"state" => {}, "param_groups" => [1], "step" => 2}, optimizer.state_dict)
      optimizer.load_state_dict(optimizer.state_dict.merge("step" => 9))
      assert_equal [9, {"state" => {}, "param_groups" => [1]}], [averager.step, plain.loaded]
      assert_output(nil, /no "step"/) { optimizer.load_state_dict(plain.state_dict) }
      assert_equal 0, averager.step
    end
  end

  def test_wrong_arguments
    assert_match(/period: .*got 0/, assert_raises(ArgumentError) { PeriodicModelAverager.new(period: 0) }.message)
    assert_match(/warmup_steps: .*got -1/, assert_raises(ArgumentError) { PeriodicModelAverager.new(period: 2, warmup_steps: -1) }.message)
    assert_output(nil, /period: 1/) { PeriodicModelAverager.new(period: 1) }
    assert_match(/optim: .*got nil/, assert_raises(ArgumentError) { PostLocalSGDOptimizer.new(nil, nil) }.message)
    plain = Torch::Optim::SGD.new([parameter(0.0)], lr: 1)
    assert_match(/averager: .*got 3/, assert_raises(ArgumentError) { PostLocalSGDOptimizer.new(plain, 3) }.message)
    alone { assert_match(/params: .*got 3/, assert_raises(ArgumentError) { ModelAveraging.average_parameters([3]) }.message) }
  end
end
