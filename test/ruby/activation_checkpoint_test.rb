# frozen_string_literal: true

require_relative "test_helper"
require "torch/utils/checkpoint"

class ActivationCheckpointTest < Minitest::Test
  DDP = Torch::NN::Parallel::DistributedDataParallel
  Checkpoint = Torch::Utils::Checkpoint

  # Two layers, of which `inner` may be a segment.
  class Net < Torch::NN::Module
    def initialize(segments)
      super()
      @segments = segments
      @inner = Torch::NN::Sequential.new(Torch::NN::Linear.new(5, 7), Torch::NN::Tanh.new)
      @outer = Torch::NN::Linear.new(7, 3)
    end

    def forward(x)
      hidden = @segments ? Checkpoint.checkpoint(@inner, x) : @inner.call(x)
      @outer.call(hidden)
    end
  end

  def setup
    Torch.manual_seed(11)
    @layer = Torch::NN::Linear.new(5, 4)
    @input = Torch.randn(3, 5, requires_grad: true)
  end

  # In a process of its own, where backward may run.
  def aside
    Distributed.fork_world(1) { yield && nil }
  end

  def gradients
    tensors = [@input, *@layer.parameters]
    tensors.each { |tensor| tensor.grad&.zero! }
    yield.backward
    tensors.map { |tensor| tensor.grad.to_a }
  end

  def test_gradients_are_those_of_the_same_without_a_segment
    aside do
      expected = gradients { @layer.call(@input * 2).tanh.sum }
      assert_equal expected, gradients { Checkpoint.checkpoint(@layer, @input * 2).tanh.sum }
      assert_equal expected, gradients { Checkpoint.checkpoint(@input) { |x| @layer.call(x * 2).tanh }.sum }
      in_two = gradients { Checkpoint.checkpoint(@input) { |x| Checkpoint.checkpoint(@layer, x * 2).tanh }.sum }
      assert_equal expected, in_two
    end
  end

  def test_arguments_and_results_may_be_nested
    aside do
      segment = lambda do |pair, scale:, bias: nil|
        sum = @layer.call(pair[:x]) * scale + bias
        {sum: sum, list: [pair[:n], sum * 3, pair[:number]]}
      end
      bias = Torch.ones(4, requires_grad: true)
      result = Checkpoint.checkpoint(segment, {x: @input, n: Torch.arange(3), number: 9}, scale: 2, bias: bias)
      assert_equal [0, 1, 2], result[:list][0].to_a
      refute result[:list][0].requires_grad
      assert_equal 9, result[:list][2]
      loss = result[:sum].sum + result[:list][1].sum
      plain = segment.call({x: @input, n: nil, number: nil}, scale: 2, bias: bias)
      expected = gradients { plain[:sum].sum + plain[:list][1].sum }
      assert_equal [12.0] * 4, bias.grad.to_a
      bias.grad.zero!
      assert_equal expected, gradients { loss }
      assert_equal [12.0] * 4, bias.grad.to_a
    end
  end

  def test_the_segment_keeps_nothing_and_runs_again_in_backward
    aside do
      runs = []
      output = Checkpoint.checkpoint(@input) do |x|
        runs << Torch.grad_enabled?
        x * 2
      end
      assert output.requires_grad
      assert_equal [false], runs
      output.sum.backward
      assert_equal [false, true], runs
    end
  end

  # Scripts that come from PyTorch pass it.
  def test_use_reentrant_is_not_the_functions
    aside do
      expected = gradients { @layer.call(@input).sum }
      [true, false, nil].each do |value|
        assert_equal expected, gradients { Checkpoint.checkpoint(@layer, @input, use_reentrant: value).sum }
      end
    end
    assert_equal [3.0], Torch.no_grad { Checkpoint.checkpoint(->(x) { x }, Torch.tensor([3.0]), use_reentrant: false) }.to_a
    assert_match(/use_reentrant: .*got 1/, assert_raises(ArgumentError) { Checkpoint.checkpoint(@layer, @input, use_reentrant: 1) }.message)
  end

  def test_without_grad_it_is_a_call
    runs = 0
    output = Torch.no_grad { Checkpoint.checkpoint(@input) { |x| (runs += 1) && x * 2 } }
    refute output.requires_grad
    assert_equal 1, runs
  end

  def test_random_numbers_repeat
    aside do
      drop = ->(x) { x * Torch.rand(3, 5) }
      Torch.manual_seed(5)
      expected = gradients { @layer.call(drop.call(@input)).sum }
      follows = Torch.rand(3).to_a
      Torch.manual_seed(5)
      assert_equal expected, gradients { @layer.call(Checkpoint.checkpoint(drop, @input)).sum }
      assert_equal follows, Torch.rand(3).to_a
      Torch.manual_seed(5)
      refute_equal expected, gradients { @layer.call(Checkpoint.checkpoint(drop, @input, preserve_rng_state: false)).sum }
    end
  end

  def test_what_a_segment_raises_is_the_cause
    aside do
      runs = 0
      loss = Checkpoint.checkpoint(@input) { |x| ((runs += 1) > 1) ? raise(IOError, "no more") : x * 2 }.sum
      error = assert_raises(RuntimeError) { loss.backward }
      assert_includes error.message, "a checkpointed segment raised IOError: no more"
      assert_kind_of IOError, error.cause
      changing = Checkpoint.checkpoint(@input) { |x| Array.new(runs += 1) { x * 2 } }
      error = assert_raises(RuntimeError) { changing.sum(&:sum).backward }
      assert_includes error.message, "returned 4 tensors in backward, but 3 in forward"
      assert_raises(ArgumentError) { Checkpoint.checkpoint(nil, @input) }
    end
  end

  # Autograd alone would sum the gradient up to the smaller shape.
  def test_a_segment_of_another_shape_in_backward_is_named
    aside do
      runs = 0
      result = Checkpoint.checkpoint(@input) { |x| ((runs += 1) > 1) ? x[0] * 2 : x * 2 }
      error = assert_raises(Distributed::InvalidArgumentError) { result.sum.backward }
      assert_match(/output 0 of a checkpointed segment has the shape #{Regexp.escape(@input.shape.drop(1).inspect)} in backward, but/, error.message)
    end
  end

  def test_segments_are_let_go
    aside do
      count = lambda do
        GC.start
        ObjectSpace.each_object(Checkpoint::Segment).count
      end
      before = count.call
      300.times { Checkpoint.checkpoint(@layer, @input).sum.backward }
      assert_operator count.call - before, :<, 20
    end
  end

  def test_segments_under_data_parallel
    results = world(2) do |rank|
      [false, true].map do |segments|
        Torch.manual_seed(7)
        net = Net.new(segments)
        model = DDP.new(net)
        inputs = Torch.randn(4, 6, 5)
        4.times do |step|
          net.zero_grad
          model.call(inputs[step].narrow(0, rank * 3, 3)).pow(2).mean.backward
          Torch.no_grad { net.parameters.each { |parameter| parameter.sub!(parameter.grad * 0.1) } }
        end
        net.parameters.map(&:to_a)
      end
    end
    assert_equal results[0], results[1]
    assert_equal results[0][0], results[0][1]
  end

  # The same layer in two segments.
  class Twice < Torch::NN::Module
    def initialize
      super
      @layer = Torch::NN::Linear.new(5, 5)
    end

    def forward(x)
      2.times { x = Torch::Utils::Checkpoint.checkpoint(@layer, x) }
      x
    end
  end

  def test_segments_that_share_a_layer_have_a_static_graph
    results = world(2) do |rank|
      inputs = Array.new(2) { |of| Torch.arange(30).float.reshape(6, 5) * 0.1 + of }
      net, alone = Array.new(2) { Twice.new }
      [net, alone].each { |each| Torch.no_grad { each.parameters.each { |parameter| parameter.fill!(0.25) } } }
      model = DDP.new(net, static_graph: true)
      averaged = Array.new(3) do
        net.zero_grad
        model.call(inputs[rank]).pow(2).mean.backward
        net.parameters.map { |parameter| parameter.grad.flatten.to_a }
      end
      inputs.each { |each| alone.call(each).pow(2).mean.backward }
      [averaged, alone.parameters.map { |parameter| (parameter.grad / 2).flatten.to_a }]
    end
    assert_equal results[0], results[1]
    results[0][0].each do |gradients|
      gradients.flatten.zip(results[0][1].flatten) { |averaged, expected| assert_in_delta expected, averaged, 1e-5 * expected.abs }
    end
  end

  # What layers compute is freed amid the step, not at the next one.
  def test_memory
    peaks = world(1) do
      layers = Array.new(8) { Torch::NN::Sequential.new(Torch::NN::Linear.new(64, 128), Torch::NN::Tanh.new, Torch::NN::Linear.new(128, 64), Torch::NN::Tanh.new) }
      x = Torch.randn(16_384, 64)
      [false, true].map do |checkpointed|
        2.times.map do
          GC.start
          Distributed.reset_peak_memory_stats
          before = Distributed.memory_stats[:current_bytes]
          layers.reduce(x) { |y, layer| checkpointed ? Torch::Utils::Checkpoint.checkpoint(layer, y) : layer.call(y) }.sum.backward
          Distributed.memory_stats[:peak_bytes] - before
        end.last
      end
    end.first
    # 24 MiB a layer without; with, 4 of them and what the budget leaves.
    assert_operator peaks[0], :>, 8 * 22 * 1024 * 1024
    assert_operator peaks[1], :<, 0.6 * peaks[0]
  end
end
