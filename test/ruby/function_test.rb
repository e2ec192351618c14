# frozen_string_literal: true

require_relative "test_helper"

# Functions with a backward in Ruby: values and gradients beside those of torch's operations.
class FunctionTest < Minitest::Test
  Function = Torch::Distributed::Function

  class Cube < Function
    def self.forward(ctx, x)
      ctx.save_for_backward(x)
      x**3
    end

    def self.backward(ctx, grad)
      x, = ctx.saved_tensors
      grad * 3 * x**2
    end
  end

  # Saves its result.
  class Exp < Function
    class << self
      attr_accessor :in_place
    end

    def self.forward(ctx, x)
      y = x.exp
      ctx.save_for_backward(nil, y)
      y
    end

    def self.backward(ctx, grad)
      nothing, y = ctx.saved_tensors
      raise "expected nil" unless nothing.nil?

      grad * y
    end
  end

  # scale * (a + b), a - b, of arguments among others; counts and shows what it gets.
  class Both < Function
    class << self
      attr_accessor :seen
    end

    def self.forward(ctx, scale, a, list, b)
      ctx.scale = scale
      ctx[:list] = list
      [(a + b) * scale, :between, a - b]
    end

    def self.backward(ctx, sum, between, difference)
      self.seen = [sum&.to_a, between, difference&.to_a, ctx.needs_input_grad, ctx.scale, ctx[:list]]
      sum = sum.nil? ? 0 : sum * ctx.scale
      difference = 0 if difference.nil?
      [nil, sum + difference, nil, ctx.needs_input_grad[3] ? sum - difference : nil]
    end
  end

  class Reversal < Function
    def self.forward(_ctx, x)
      x
    end

    def self.backward(_ctx, grad)
      -grad
    end
  end

  class Negation < Function
    def self.forward(_ctx, x)
      -x
    end

    def self.backward(_ctx, grad)
      -grad
    end
  end

  # What the test wants: blocks as forward and backward.
  def function(forward, &backward)
    Class.new(Function) do
      define_singleton_method(:forward, &forward)
      define_singleton_method(:backward, &backward)
      define_singleton_method(:to_s) { "Made" }
    end
  end

  def input(*values)
    Torch.tensor(values, dtype: :float64).requires_grad!
  end

  # In a process of its own, where backward may run.
  def aside
    Distributed.fork_world(1) { yield && nil }
  end

  def gradient(x)
    x.grad&.zero!
    yield.backward
    x.grad.to_a
  end

  def test_values_and_gradients_are_those_of_operations
    aside do
      x = input(1.0, -2.0, 0.5)
      y = Cube.apply(x * 2)
      assert_equal [8.0, -64.0, 1.0], y.to_a
      assert y.requires_grad
      assert_equal gradient(x) { ((x * 2)**3 * Torch.tensor([1.0, 2.0, 3.0])).sum }, gradient(x) { (y * Torch.tensor([1.0, 2.0, 3.0])).sum }
      assert_equal gradient(x) { x.exp.exp.sum }, gradient(x) { Exp.apply(Exp.apply(x)).sum }
    end
  end

  def test_several_results_and_other_arguments
    aside do
      a = input(1.0, 2.0)
      b = input(3.0, 5.0)
      sum, between, difference = Both.apply(2, a, [a, 7], b)
      assert_equal [[8.0, 14.0], :between, [-2.0, -3.0]], [sum.to_a, between, difference.to_a]
      (sum * 10 + difference).sum.backward
      assert_equal [[21.0, 21.0], [19.0, 19.0]], [a.grad.to_a, b.grad.to_a]
      seen = Both.seen
      assert_equal [[10.0, 10.0], nil, [1.0, 1.0], [false, true, false, true], 2], seen.first(5)
      assert_equal [1.0, 2.0], seen[5][0].to_a
      # Zeros for what the loss doesn't depend on, and no gradient where none is wanted.
      a = input(1.0, 2.0)
      b = Torch.ones(2, dtype: :float64)
      Both.apply(3, a, nil, b).first.sum.backward
      assert_equal [3.0, 3.0], a.grad.to_a
      assert_nil b.grad
      assert_equal [[1.0, 1.0], nil, [0.0, 0.0], [false, true, false, false]], Both.seen.first(4)
    end
  end

  def test_gradients_that_are_not_there
    aside do
      seen = nil
      forward = lambda do |ctx, x, y|
        ctx.set_materialize_grads(false)
        ctx.scale = 1
        [x * 2, y * 3, x + y]
      end
      made = function(forward) { |_ctx, *grads| (seen = grads.map(&:nil?)) && [grads[0] * 2, nil] }
      x = input(1.0)
      y = input(2.0)
      made.apply(x * 1, y)[0].sum.backward
      assert_equal [false, true, true], seen
      assert_equal [2.0], x.grad.to_a
      assert_nil y.grad
    end
  end

  def test_results_without_a_gradient
    aside do
      seen = nil
      forward = lambda do |ctx, x|
        largest = x * 1
        ctx.mark_non_differentiable(largest)
        [x * 2, largest, Torch.arange(2), x.gt(0)]
      end
      made = function(forward) { |_ctx, *grads| (seen = grads.map { |grad| [grad.dtype, grad.to_a] }) && grads[0] * 2 }
      x = input(1.0, -3.0)
      doubled, *others = made.apply(x)
      assert_equal [true, false, false, false], [doubled, *others].map(&:requires_grad)
      assert_equal [[1.0, -3.0], [0, 1], [true, false]], others.map(&:to_a)
      doubled.sum.backward
      assert_equal [2.0, 2.0], x.grad.to_a
      zeros = [[:float64, [0.0, 0.0]], [:int64, [0, 0]], [:bool, [false, false]]]
      assert_equal [[:float64, [1.0, 1.0]], *zeros], seen
    end
  end

  def test_without_grad_there_is_no_history
    x = input(2.0)
    [Torch.no_grad { Cube.apply(x) }, Cube.apply(x.detach), Torch.no_grad { Reversal.apply(x) }, Reversal.apply(x.detach)].each do |y|
      refute y.requires_grad
    end
    grad = nil
    y = function(->(_ctx, at) { (grad = Torch.grad_enabled?) || at * 2 }) {}.apply(x)
    assert_equal [false, true], [grad, Torch.grad_enabled?]
    assert y.requires_grad
  end

  def test_a_second_backward
    aside do
      [Cube, Exp].each do |made|
        x = input(2.0)
        loss = made.apply(x).sum
        loss.backward(retain_graph: true)
        first = x.grad.to_a
        loss.backward
        assert_equal [2 * first[0]], x.grad.to_a
        error = assert_raises(RuntimeError, Distributed::InvalidArgumentError) { loss.backward }
        assert_match(/second time/, error.message)
      end
      y = Cube.apply(input(2.0))
      y.backward
      assert_match(/backward through FunctionTest::Cube a second time.*retain_graph: true/, assert_raises(Distributed::InvalidArgumentError) { y.backward }.message)
    end
  end

  # Of the loss (the sum of the first derivatives) ** 2 / 2, added to the first derivatives.
  def test_second_derivatives
    aside do
      x = input(2.0, 0.5)
      Cube.apply(x).sum.backward(create_graph: true)
      assert x.grad.requires_grad
      total = x.grad.sum
      assert_equal 12.75, total.item
      (total**2 / 2).backward
      x.grad.to_a.zip([12.0 + 12.75 * 12, 0.75 + 12.75 * 3]) { |found, expected| assert_in_delta expected, found, 1e-12 }
      # The saved result has its history in backward.
      x = input(0.25)
      Exp.apply(x * 2).sum.backward(create_graph: true)
      x.grad.sum.backward
      assert_in_delta 6 * Math.exp(0.5), x.grad.item, 1e-12
      grad = nil
      made = function(->(_ctx, at) { at * 2 }) { |_ctx, g| (grad = Torch.grad_enabled?) || g * 2 }
      made.apply(input(1.0)).backward
      assert_equal false, grad
    end
  end

  def test_changes_in_place_are_detected
    aside do
      x = input(1.0, 2.0) * 1
      y = Cube.apply(x)
      x.mul!(2)
      assert_match(/modified by an inplace operation/, assert_raises(*LIBTORCH_ERRORS) { y.sum.backward }.message)
      y = Exp.apply(input(1.0, 2.0))
      loss = y.sum
      y.add!(1)
      assert_match(/modified by an inplace operation/, assert_raises(*LIBTORCH_ERRORS) { loss.backward }.message)
      # Of what isn't saved they are autograd's.
      x = input(1.0)
      y = Cube.apply(x)
      y.mul!(5)
      assert_equal [15.0], gradient(x) { y.sum }
    end
  end

  def test_inputs_and_views_as_results
    aside do
      x = input(1.0, 2.0)
      assert_equal [-3.0, -3.0], gradient(x) { (Reversal.apply(x) * 3).sum }
      assert_equal [-3.0, -3.0], gradient(x) { (Reversal.apply(x * 1) * 3).sum }
      twice = function(->(_ctx, at) { [at, at] }) { |_ctx, a, b| a * 10 + b }
      a, b = twice.apply(x)
      assert_equal [12.0, 12.0], gradient(x) { (a + b * 2).sum }
      transposed = function(->(_ctx, at) { at.t }) { |_ctx, grad| grad.t }
      m = Torch.arange(6).double.reshape(2, 3).requires_grad!
      y = transposed.apply(m)
      assert_equal [3, 2], y.shape
      (y * Torch.arange(6).double.reshape(3, 2)).sum.backward
      assert_equal [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]], m.grad.to_a
      # The input's history would know nothing of it.
      y = Reversal.apply(x * 1)
      assert_match(/view.*modified inplace.*custom Function/m, assert_raises(*LIBTORCH_ERRORS) { y.mul!(2) }.message)
    end
  end

  def test_exceptions_reach_the_caller
    aside do
      made = function(->(_ctx, x) { x * 2 }) { |*| raise IOError, "no more" }
      error = assert_raises(RuntimeError) { made.apply(input(1.0)).backward }
      assert_includes error.message, "Made.backward raised IOError: no more"
      assert_kind_of IOError, error.cause
      assert_raises(IOError) { function(->(*) { raise IOError }) {}.apply(input(1.0)) }
      assert Torch.grad_enabled?
      made = function(->(_ctx, x) { x * 2 }) { |*| throw :out }
      assert_match(/Made.backward was left by throw/, assert_raises(RuntimeError) { catch(:out) { made.apply(input(1.0)).backward } }.message)
    end
  end

  def test_wrong_gradients
    aside do
      text = lambda do |*arguments, &backward|
        made = function(->(_ctx, x, *) { x * 2 }, &backward)
        assert_raises(RuntimeError, Distributed::InvalidArgumentError) { made.apply(*arguments).sum.backward }.message
      end
      x = input(1.0, 2.0)
      assert_includes(text.call(x) { |_ctx, grad| [grad, grad] }, "expected 1 gradients, one (or nil) for each argument of forward, got 2")
      assert_includes(text.call(x, 3) { |_ctx, grad| grad }, "expected 2 gradients, one (or nil) for each argument of forward, got 1")
      assert_includes(text.call(x) { |_ctx, grad| grad.sum }, "Made.backward returned a gradient for argument 0 of the shape [], expected the argument's, [2]")
      assert_includes(text.call(x) { |_ctx, grad| Torch.ones(3, 2) }, "of the shape [3, 2], expected the argument's, [2]")
      assert_match(/argument 0 of the dtype float, expected the argument's, double/, text.call(x) { |_ctx, grad| grad.float })
      assert_includes(text.call(x, 3) { |_ctx, grad| [grad, grad] }, "for argument 1, which is not a tensor: expected none")
      assert_match(/raised TypeError: expected a Torch::Tensor, got 5/, text.call(x) { |*| 5 })
      made = function(->(_ctx, at) { at * 2 }) { |_ctx, grad| [grad * 2, nil, nil] } # further ones are nil
      assert_equal [2.0, 2.0], gradient(x) { made.apply(x).sum }
    end
  end

  def test_what_a_context_refuses
    x = input(1.0)
    context = nil
    made = function(->(ctx, at) { (context = ctx) && at * 2 }) {}
    made.apply(x)
    assert_raises(Torch::Distributed::Error) { context.saved_tensors }
    assert_raises(Torch::Distributed::Error) { context.save_for_backward(x) }
    assert_raises(NoMethodError) { context.nothing }
    assert_nil context[:nothing]
    context.anything = 3
    assert_equal 3, context.anything
    assert_respond_to context, :anything
    assert_match(/Context of Made: anything/, context.inspect)
    assert_raises(TypeError) { function(->(ctx, _) { ctx.save_for_backward(3) }) {}.apply(x) }
    assert_raises(ArgumentError) { function(->(ctx, at) { [ctx.mark_non_differentiable(at), at * 2].last }) {}.apply(x) }
    assert_raises(NotImplementedError) { Class.new(Function).apply(x) }
    error = assert_raises(Torch::Distributed::UnsupportedError) { function(->(*) { Torch.empty(2, device: "meta") }) {}.apply(x) }
    assert_match(/output 0 of Made is on meta, .*compute on the CPU/, error.message)
  end

  def test_threads
    aside do
      threads = Array.new(4) do |i|
        Thread.new do
          Array.new(20) do
            x = input(i + 1.0)
            gradient(x) { Cube.apply(x).sum }[0]
          end.uniq
        end
      end
      assert_equal [[3.0], [12.0], [27.0], [48.0]], threads.map(&:value)
    end
  end

  # Segments nested 60 deep and more are computed by other threads.
  def test_other_threads_of_autograds
    aside do
      texts = (50..70).step(1).map do |depth|
        nested = ->(x) { Cube.apply(x) }
        depth.times { nested = nested.then { |inner| ->(x) { Torch::Utils::Checkpoint.checkpoint(inner, x) } } }
        failure { nested.call(input(1.0)).sum.backward }&.last
      end
      assert_nil texts.first
      assert(texts.compact.any? { |text| text.match?(/the backward of a Function is Ruby code, but.*compose it of tensor operations/) }, texts.inspect)
    end
  end

  def contexts(function)
    3.times { GC.start }
    ObjectSpace.each_object(Function::Context).count { |context| context.function == function }
  end

  def test_nothing_leaks
    aside do
      made = function(lambda do |ctx, x|
        y = x.exp
        ctx.save_for_backward(x, y)
        ctx.large = [x, y]
        y
      end) { |ctx, grad| grad * ctx.saved_tensors[1] }
      run = lambda do |backward|
        100.times do
          y = made.apply(made.apply(input(0.1)) * 1).sum
          y.backward if backward
        end
      end
      run.call(true)
      assert_operator contexts(made), :<, 10
      run.call(false)
      assert_operator contexts(made), :<, 10
    end
  end

  def test_the_graph_keeps_the_context_until_backward
    aside do
      ys = Array.new(30) { Exp.apply(input(0.5)) }
      assert_equal 30, contexts(Exp)
      ys.each(&:backward)
      assert_operator contexts(Exp), :<, 10
      assert_equal 30, ys.size
    end
  end

  # Without recursion, for which there is not enough stack.
  def test_long_chains_are_freed
    aside do
      x = input(1.0)
      y = x
      50_000.times { y = Negation.apply(y) }
      y.backward
      assert_equal [1.0], x.grad.to_a
      y = nil # rubocop:disable Lint/UselessAssignment
      assert_operator contexts(Negation), :<, 10
    end
  end

  class Net < Torch::NN::Module
    def initialize
      super
      Torch.manual_seed(4)
      @first = Torch::NN::Linear.new(3, 4)
      @second = Torch::NN::Linear.new(4, 2)
    end

    def forward(x, custom)
      hidden = @first.call(x)
      @second.call(custom ? Cube.apply(hidden) : hidden**3)
    end
  end

  def test_under_data_parallel
    results = world(2) do |rank|
      [true, false].map do |custom|
        net = Net.new
        model = Torch::NN::Parallel::DistributedDataParallel.new(net, find_unused_parameters: custom)
        Torch.manual_seed(rank)
        model.call(Torch.randn(5, 3), custom).sum.backward
        net.parameters.map { |parameter| parameter.grad.flatten.to_a }
      end
    end
    assert_equal results[0][0], results[1][0]
    results[0][0].flatten.zip(results[0][1].flatten) { |one, other| assert_in_delta other, one, 1e-4 * (1 + other.abs) }
  end
end
