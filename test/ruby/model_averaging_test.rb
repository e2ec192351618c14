# frozen_string_literal: true

require_relative "test_helper"

class ModelAveragingTest < Minitest::Test
  ModelAveraging = Torch::Distributed::Algorithms::ModelAveraging
  PeriodicModelAverager = ModelAveraging::PeriodicModelAverager
  HierarchicalModelAverager = ModelAveraging::HierarchicalModelAverager
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

  # Of 4 ranks: pairs every 2 steps, all every 6; steps 0 and 1 are warm-up.
  def test_small_groups_average_more_often_than_all
    results = world(4) do |rank|
      averager = HierarchicalModelAverager.new(period_group_size_dict: {2 => 2, 6 => 4}, warmup_steps: 1)
      weight = parameter(0.0)
      8.times.map do
        Torch.no_grad { weight.fill!(rank) }
        averager.average_parameters([weight])
        weight[0].item
      end << averager.step
    end
    4.times do |rank|
      pair = rank / 2 * 2 + 0.5
      assert_equal [rank, rank, pair, rank, pair, rank, 1.5, rank, 8], results[rank]
    end
  end

  def test_an_optimizer_with_groups_of_several_sizes_in_a_group_of_some_ranks
    results = world(3) do |rank|
      group = Torch::Distributed.new_group([0, 2])
      next if rank == 1

      averager = HierarchicalModelAverager.new(period_group_size_dict: {1 => 1, 3 => 2}, warmup_steps: 0, process_group: group)
      weight = parameter(rank.to_f)
      optimizer = PostLocalSGDOptimizer.new(Torch::Optim::SGD.new([weight], lr: 1), averager)
      values = 4.times.map do
        optimizer.zero_grad
        (weight * (rank + 1)).sum.backward
        optimizer.step
        weight[0].item
      end
      values << averager.period_process_group_dict.transform_values(&:ranks)
    end
    # From 0 and 2 in steps of -1 and -3, averaged after the first and the fourth.
    assert_equal [[-1.0, -2.0, -3.0, -7.0, {1 => [0], 3 => [0, 2]}], nil, [-1.0, -4.0, -7.0, -7.0, {1 => [2], 3 => [0, 2]}]], results
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

  def test_wrong_periods_and_group_sizes
    wrong = {
      {} => /expected a Hash of periods.*got \{\}/, [2] => /expected a Hash of periods.*got \[2\]/,
      {0 => 2} => /positive Integers as periods, got 0/, {nil => 2} => /as periods, got nil/,
      {4 => 1, 2 => 2} => /rising order, got 4, 2/, {2 => 3} => /divisors of the group's size 2, got 3/,
      {2 => nil} => /divisors of the group's size 2, got nil/, {2 => 1} => /all 2 processes.*got 1/
    }
    results = world(2) do
      messages = wrong.keys.map do |dict|
        assert_raises(ArgumentError) { HierarchicalModelAverager.new(period_group_size_dict: dict) }.message
      end
      messages << assert_raises(ArgumentError) { HierarchicalModelAverager.new(period_group_size_dict: {2 => 2}, warmup_steps: -1) }.message
      other = Torch::Distributed::GroupMember::NON_GROUP_MEMBER
      messages << assert_raises(ArgumentError) { HierarchicalModelAverager.new(period_group_size_dict: {2 => 2}, process_group: other) }.message
      assert_output(nil, /longest period/) { HierarchicalModelAverager.new(period_group_size_dict: {1 => 2}) }
      messages
    end
    expected = [*wrong.values, /warmup_steps: .*got -1/, /process_group: expected a group that this process is in/]
    results.each { |messages| messages.zip(expected) { |message, pattern| assert_match(pattern, message) } }
  end
end
