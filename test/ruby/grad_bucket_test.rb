# frozen_string_literal: true

require_relative "test_helper"

# Communication hooks in Ruby, as the core of DistributedDataParallel calls them.
class GradBucketTest < Minitest::Test
  CommHook = Torch::Distributed::CommHook
  SHAPES = [[3, 5], [7], [2, 2, 2]].freeze

  # One backward: parameter i's gradient is (i + 1) * (rank + 1) on each rank.
  def backward(params, rank)
    params.each_with_index.map { |param, i| param.sum * ((i + 1) * (rank + 1)) }.sum.backward
  end

  def with_hook(hook, rank, rounds: 1)
    params = SHAPES.map { |shape| Torch.zeros(shape, dtype: :float64, requires_grad: true) }
    group = Distributed.default_process_group
    core = Torch::Distributed::GradientSync._create(group, params, %w[a b c], [0, 0, 0], [], [], {limits: [64]})
    core.comm_hook = hook
    rounds.times do
      params.each { |param| param.grad = nil }
      core.prepare(true)
      core.arm(true)
      backward(params, rank)
    end
    params.map { |param| param.grad.to_a.flatten.uniq }
  end

  # What a hook may return, and how its bucket's gradients come out of it, summed over the ranks.
  RESULTS = {
    tensor: ->(bucket) { Distributed.all_reduce(bucket.buffer) && bucket.buffer * 10 },
    float32: ->(bucket) { Distributed.all_reduce(bucket.buffer) && (bucket.buffer * 10).to(dtype: :float32) },
    list: ->(bucket) { Distributed.all_reduce(bucket.buffer) && [bucket.buffer.mul!(10)] },
    work: lambda do |bucket|
      bucket.buffer.mul!(10)
      Distributed.all_reduce(bucket.buffer, async_op: true)
    end,
    future: lambda do |bucket|
      Distributed.all_reduce(bucket.buffer, async_op: true).get_future.then { bucket.buffer * 10 }
    end,
    assigned: lambda do |bucket|
      Distributed.all_reduce(bucket.buffer)
      bucket.buffer = bucket.buffer * 10
      bucket.buffer
    end
  }.freeze

  RESULTS.each do |name, function|
    define_method(:"test_a_hook_may_return_#{name}") do
      results = world(2) { |rank| with_hook(CommHook.ruby(function), rank, rounds: 3) }
      assert_equal [[[30.0], [60.0], [90.0]]] * 2, results
    end
  end

  def test_a_bucket_tells_what_it_has
    results = world(2) do |rank|
      seen = []
      hook = lambda do |bucket|
        seen << [bucket.index, bucket.last?, bucket.parameter_indices, bucket.gradients.map(&:shape),
          bucket.gradients.map { |gradient| gradient.to_a.flatten.uniq }, bucket.iteration]
        bucket.gradients.each { |gradient| gradient.add!(1) }
        bucket.buffer
      end
      grads = with_hook(CommHook.ruby(hook), rank, rounds: 2)
      [seen, grads]
    end
    results.each_with_index do |(seen, grads), rank|
      base = rank + 1.0
      assert_equal [[base + 1], [2 * base + 1], [3 * base + 1]], grads
      assert_equal [0, true, 0], seen[0].values_at(0, 1, 5)
      assert_equal [0, 1, 2], seen[0][2].sort
      rebuilt = seen.drop(1)
      assert_operator rebuilt.size, :>, 1
      assert_equal (0...rebuilt.size).to_a, rebuilt.map(&:first)
      assert_equal [false] * (rebuilt.size - 1) + [true], rebuilt.map { |bucket| bucket[1] }
      assert_equal [0, 1, 2], rebuilt.flat_map { |bucket| bucket[2] }.sort
      rebuilt.each do |_, _, indices, shapes, values, iteration|
        assert_equal indices.map { |i| SHAPES[i] }, shapes
        assert_equal indices.map { |i| [(i + 1) * base] }, values
        assert_equal 1, iteration
      end
    end
  end

  def test_what_a_hook_raises_ends_backward_and_is_the_cause
    message, cause, later = world(1) do |rank|
      hook = CommHook.ruby(->(_bucket) { raise KeyError, "not here" })
      error = assert_raises(RuntimeError) { with_hook(hook, rank) }
      wrong = assert_raises(RuntimeError) { with_hook(CommHook.ruby(->(_bucket) { 7 }), rank) }
      [error.message, error.cause.class, wrong.message]
    end.first
    assert_includes message, "a communication hook raised KeyError: not here"
    assert_equal KeyError, cause
    assert_includes later, "returned 7 (Integer): expected the bucket's result"
    assert_raises(TypeError) { CommHook.ruby(3) }
  end

  def test_hooks_of_the_library
    results = world(2) do |rank|
      [CommHook.allreduce, CommHook.noop, CommHook.compress(:float16, nil), CommHook.quantize(false, 512),
        CommHook.power_sgd({rank: 1, start_iteration: 1000, min_compression_rate: 2.0, error_feedback: true, warm_start: true,
          orthogonalization_epsilon: 0.0, seed: 0, batched: false}), CommHook.post_local_sgd(nil, 10, false)]
        .map { |hook| with_hook(hook, rank).map { |values| values.map { |value| value.round(2) } } }
    end
    results.each_with_index do |hooks, rank|
      means = [[1.5], [3.0], [4.5]]
      assert_equal means, hooks[0]
      assert_equal [[rank + 1.0], [2.0 * rank + 2], [3.0 * rank + 3]], hooks[1]
      assert_equal means, hooks[2]
      hooks[3].flatten.zip(means.flatten).each { |got, mean| assert_in_delta mean, got, 0.05 }
      assert_equal means, hooks[4]
      assert_equal means, hooks[5]
    end
  end
end
