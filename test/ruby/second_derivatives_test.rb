# frozen_string_literal: true

require_relative "test_helper"

# Gradients of gradients (create_graph), as of a gradient penalty, through each part of the library with a backward of its own: those
# of one process, or an error that says that there are none. What is only made of operations that have them is in nn_test,
# parallel_linear_test, function_test and devices_replicas_test.
class SecondDerivativesTest < Minitest::Test
  include Worlds

  F = Torch::NN::F
  NN = Torch::Distributed::NN
  Ways = Torch::Distributed::Tensor::Parallel
  CLASSES = 6

  def double(*shape)
    Torch.randn(*shape).to(dtype: :float64)
  end

  # The sum of the squares of x's gradient, differentiated by all of these; and the gradient of that once more.
  #
  # @return [Array<Array>] the first derivatives, and those of the penalty
  def penalty(loss, x, *others)
    loss.backward(create_graph: true)
    tensors = [x, *others]
    first = tensors.map { |each| each.grad.detach.to_a }
    gradient = x.grad
    tensors.each { |each| each.grad = nil }
    (gradient**2).sum.backward(create_graph: true)
    second = tensors.map { |each| each.grad.detach.to_a }
    curve = x.grad
    tensors.each { |each| each.grad = nil }
    (curve**2).sum.backward
    [first, second, tensors.map { |each| each.grad.detach.to_a }]
  end

  def drop_gradients(tensors)
    tensors.each { |each| each.grad = nil }
  end

  def assert_near(expected, actual, message)
    pairs = expected.flatten.zip(actual.flatten)
    assert_equal expected.flatten.size, actual.flatten.size, message
    worst = pairs.map { |one, two| (one - two).abs }.max
    assert_operator worst, :<=, 1e-9 * [1, expected.flatten.map(&:abs).max].max, "#{message}: #{actual.inspect[0, 200]}, expected #{expected.inspect[0, 200]}"
  end

  # Logits by a layer whose outputs are divided; a target in each part, and one that does not count.
  def cross_entropies
    Torch.manual_seed(3)
    x, weight = [double(4, 5), double(CLASSES, 5)]
    [x, weight, Torch.tensor([0, 4, -100, 5], dtype: :int64)]
  end

  [1, 2, 3].each do |size|
    %w[mean sum].each do |reduction|
      define_method(:"test_cross_entropy_of_divided_logits_on_#{size}_ranks_#{reduction}") do
        expected = world(1) do
          x, weight, target = cross_entropies
          [x, weight].each { |each| each.requires_grad!(true) }
          penalty(F.cross_entropy(x.matmul(weight.t), target, reduction: reduction, ignore_index: -100), x, weight)
        end.first
        results = world(size) do |rank|
          x, weight, target = cross_entropies
          part = weight.narrow(0, rank * CLASSES / size, CLASSES / size).clone
          [x, part].each { |each| each.requires_grad!(true) }
          penalty(Ways.cross_entropy(NN.column_linear(x, part), target, reduction: reduction), x, part)
        end
        3.times do |order|
          assert_near expected[order][1], results.flat_map { |result| result[order][1] }, "weight, derivative #{order + 1}"
          results.each { |result| assert_near expected[order][0], result[order][0], "input, derivative #{order + 1}" }
        end
      end
    end
  end

  # Parts that could give no second derivative but a wrong one.
  REFUSED = {
    sync_batch_norm: lambda { |x|
      Torch::NN::SyncBatchNorm.new(3).double.call(x).pow(2).sum
    },
    checkpoint: lambda { |x|
      Torch::Utils::Checkpoint.checkpoint(->(input) { input.pow(3) }, x).sum
    },
    distributed_data_parallel: lambda { |x|
      Torch::NN::Parallel::DistributedDataParallel.new(Torch::NN::Linear.new(3, 1).double).call(x).pow(2).sum
    },
    ddp_hook: lambda { |x|
      weight = Torch::NN::Parameter.new(Torch.ones(3, dtype: :float64))
      Distributed.register_ddp_hook(weight, nil, 2)
      (x * weight).pow(3).sum
    }
  }.freeze

  def test_what_has_none_says_so
    said = world(2) do
      REFUSED.transform_values do |part|
        x = Torch.ones(4, 3, dtype: :float64).requires_grad!(true)
        failure { part.call(x).backward(create_graph: true) }
      end
    end
    said.each { |each| each.each { |name, (_, text)| assert_match(/create_graph/, text.to_s, name) } }
  end
end
