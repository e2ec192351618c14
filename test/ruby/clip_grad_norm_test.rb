# frozen_string_literal: true

require_relative "test_helper"

class ClipGradNormTest < Minitest::Test
  Utils = Torch::NN::Utils
  VALUES = [[3.0, -4.0], [12.0], []].freeze

  def parameters(values = VALUES, dtype: :float32)
    values.map do |numbers|
      param = Torch::NN::Parameter.new(Torch.zeros(numbers.size, dtype: dtype))
      param.grad = Torch.tensor(numbers, dtype: dtype)
      param
    end
  end

  def gradients(params)
    params.map { |param| param.grad.to_a }
  end

  def test_gradients_that_are_too_long_are_scaled
    {float32: 1e-6, float64: 1e-12}.each do |dtype, tolerance|
      params = parameters(dtype: dtype)
      norm = Utils.clip_grad_norm_(params, 6.5)
      assert_equal [13.0, [], dtype], [norm.item, norm.shape, norm.dtype]
      factor = 6.5 / (13.0 + 1e-6)
      gradients(params).flatten.zip([3, -4, 12]).each { |got, whole| assert_in_delta whole * factor, got, tolerance * 10 }
    end
  end

  def test_those_that_are_not_stay
    params = parameters
    assert_equal 13.0, Utils.clip_grad_norm_(params, 14).item
    assert_equal VALUES, gradients(params)
  end

  def test_orders
    {1 => 19.0, 2 => 13.0, Float::INFINITY => 12.0, "inf" => 12.0, 3 => (27 + 64 + 1728)**(1 / 3.0)}.each do |order, expected|
      assert_in_delta expected, Utils.clip_grad_norm_(parameters, 100, norm_type: order).item, 1e-5
      assert_in_delta expected, Utils.get_total_norm(parameters.map(&:grad), norm_type: order).item, 1e-5
    end
    error = assert_raises(Distributed::InvalidArgumentError) { Utils.clip_grad_norm_(parameters, 1, norm_type: 0) }
    assert_includes error.message, "norm_type 0: expected a number above 0, or infinity"
  end

  def test_what_parameters_may_be
    params = parameters
    lone = Torch::NN::Parameter.new(Torch.ones(2))
    assert_equal 5.0, Utils.clip_grad_norm_(params[0], 100).item
    assert_equal 13.0, Utils.clip_grad_norm_(params.each, 100, foreach: true).item
    assert_equal 13.0, Utils.clip_grad_norm_([lone, *params, params[0]], 100).item
    assert_nil lone.grad
    assert_equal 0.0, Utils.clip_grad_norm_([lone], 1).item
    assert_equal 0.0, Utils.clip_grad_norm_([], 1).item
    assert_raises(TypeError) { Utils.clip_grad_norm_([1], 1) }
  end

  def test_norms_that_are_not_finite
    params = parameters([[Float::INFINITY], [1.0]])
    error = assert_raises(Distributed::InvalidArgumentError) { Utils.clip_grad_norm_(params, 1, error_if_nonfinite: true) }
    assert_includes error.message, "the gradients' norm of order 2 is inf, so they cannot be clipped to 1"
    assert_equal 1.0, params[1].grad.item
    assert_raises(Distributed::InvalidArgumentError) { Utils.get_total_norm(params.map(&:grad), error_if_nonfinite: true) }
    assert_equal Float::INFINITY, Utils.clip_grad_norm_(params, 1).item
    assert_equal 0.0, params[1].grad.item
    assert_predicate params[0].grad.item, :nan?
  end

  def test_a_norm_that_is_known
    params = parameters
    norm = Utils.get_total_norm(params.map(&:grad))
    assert_nil Utils.clip_grads_with_norm_(params, 6.5, norm)
    assert_in_delta 6.5, Utils.get_total_norm(params.map(&:grad)).item, 1e-5
    Utils.clip_grads_with_norm_(params, 1, 2)
    assert_in_delta 3.25, Utils.get_total_norm(params.map(&:grad)).item, 1e-5
  end

  def test_values
    params = parameters
    assert_nil Utils.clip_grad_value_(params, 3.5)
    assert_equal [[3.0, -3.5], [3.5], []], gradients(params)
  end

  def test_models_do_not_inherit_them
    refute_respond_to Torch::NN::Linear.new(1, 1), :clip_grad_norm_
  end

  # Rank r holds part r; the last one nothing.
  def test_parts_of_a_whole
    results = world(3) do |rank|
      [2, Float::INFINITY].map do |order|
        params = parameters([VALUES[rank]])
        norm = Utils.clip_grad_norm_(params, 6.0, norm_type: order, process_group: Distributed.default_process_group)
        [norm.item, *gradients(params).flatten, Utils.get_total_norm(params.map(&:grad), process_group: Distributed.default_process_group).item]
      end
    end
    results.each_with_index do |by_order, rank|
      {13.0 => 6.0, 12.0 => 6.5}.zip(by_order) do |(norm, after), got|
        factor = 6.0 / (norm + 1e-6)
        [norm, *VALUES[rank].map { |value| value * factor }, after].zip(got) { |one, other| assert_in_delta one, other, 1e-5 }
      end
    end
  end

  def test_all_ranks_learn_that_a_norm_is_not_finite
    results = world(2) do |rank|
      params = parameters([[rank.zero? ? Float::NAN : 2.0]])
      group = Distributed.default_process_group
      [failure { Utils.clip_grad_norm_(params, 1, error_if_nonfinite: true, process_group: group) }&.first, params[0].grad.item]
    end
    assert_equal ["Torch::Distributed::InvalidArgumentError"] * 2, results.map(&:first)
    assert_equal 2.0, results[1][1]
  end
end
