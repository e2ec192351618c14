# frozen_string_literal: true

require_relative "data_parallel_training"

# Parameters that a forward does not use, that it uses twice, and graphs that are promised to stay as they are.
class DataParallelUnusedTest < Minitest::Test
  include DataParallelTraining

  MODES = {
    find_unused: {find_unused_parameters: true},
    small_buckets: {find_unused_parameters: true, bucket_cap_mb: 0.0001},
    skip: {find_unused_parameters: true, skip_all_reduce_unused_params: true, bucket_cap_mb: 0.0001},
    apart: {find_unused_parameters: true, gradient_as_bucket_view: false}
  }.freeze

  # On each rank other parameters are used, differently in each step: the gradients are those of the whole batch on one process.
  MODES.each_with_index do |(name, options), index|
    define_method(:"test_branches_that_differ_by_rank_and_step_#{name}") do
      size = 2 + index % 3
      branch = ->(row, step) { (row + step) % 3 == 0 }
      forward = lambda do |model, input, step|
        rank = Distributed.initialized? ? Distributed.get_rank : 0
        rows = input.size(0)
        # One process takes all branches, each for the rows of one rank.
        parts = (rows == BATCH) ? size : 1
        Torch.cat(parts.times.map { |part| model.call(input.narrow(0, part * rows / parts, rows / parts), branch.call((parts == 1) ? rank : part, step)) })
      end
      one = alone_trained(kind: Branching, steps: 6, &forward)
      together = world(size) { |rank| train(rank, size, kind: Branching, steps: 6, **options, &forward) }
      together.each { |each| one.zip(each).each { |expected, actual| assert_follows(without_unused(expected, actual), actual, 1e-10, "#{name} on #{size}") } }
    end
  end

  # A gradient that nobody gives stays what it was, in a step after others zero.
  def without_unused(expected, actual)
    expected.to_h { |key, values| [key, (values.nil? && actual[key]&.all?(&:zero?)) ? actual[key] : values] }
  end

  def test_what_nobody_uses_keeps_its_gradient
    results = world(2) do |rank|
      MODES.values.map do |options|
        net = Branching.new
        unused = net.instance_variable_get(:@unused)
        extra = net.instance_variable_get(:@extra)
        unused.bias.grad = Torch.full([5], 7.0)
        model = DDP.new(net, **options)
        model.call(Torch.ones(2, 7), rank.zero?).sum.backward
        first = [unused.weight.grad, unused.bias.grad.to_a.uniq, extra.bias.grad.to_a.uniq]
        2.times { model.call(Torch.ones(2, 7), false).sum.backward }
        first + [unused.weight.grad, unused.bias.grad.to_a.uniq, extra.bias.grad.to_a.uniq]
      end
    end
    results.flatten(1).each { |result| assert_equal [nil, [7.0], [1.0], nil, [7.0], [1.0]], result }
  end

  def test_without_the_option_they_are_named_with_the_cure
    said = world(2) do
      model = DDP.new(Branching.new)
      failure { 2.times { model.call(Torch.ones(2, 7)).sum.backward } }
    end
    said.each do |_, text|
      assert_match(/2 of 11 parameters got no gradient.*"unused\.weight", "unused\.bias"|"unused\.bias", "unused\.weight"/m, text)
      assert_match(/find_unused_parameters/, text)
    end
  end

  # Some of the outputs are not in the loss: the model's forward reaches them, so they are told apart only afterwards.
  def test_a_forward_without_backward_and_outputs_that_are_not_used
    results = world(2) do
      net = Branching.new
      model = DDP.new(net, find_unused_parameters: true)
      3.times { model.call(Torch.ones(2, 7)) }
      model.call(Torch.ones(2, 7)).sum.backward
      net.instance_variable_get(:@third).bias.grad.to_a
    end
    assert_equal [[2.0] * 3] * 2, results
  end

  def test_no_sync_with_unused_parameters
    results = world(2) do |rank|
      net = Branching.new
      model = DDP.new(net, find_unused_parameters: true)
      model.no_sync { model.call(Torch.ones(2, 7), rank.zero?).sum.backward }
      model.call(Torch.ones(2, 7), false).sum.backward
      [net.instance_variable_get(:@extra).bias.grad.to_a.uniq, net.instance_variable_get(:@unused).bias.grad]
    end
    assert_equal [[[1.0], nil]] * 2, results
  end

  # --- static_graph ---

  class Twice < Odd
    def forward(x)
      super + @third.call(Torch.tanh(@second.call(@first.call(x))))
    end
  end

  def test_static_graph_with_unused_parameters_and_some_that_are_used_twice
    forward = ->(model, input, _) { model.call(input) }
    [[Branching, 2], [Twice, 3]].each do |kind, size|
      one = alone_trained(kind: kind, &forward)
      together = world(size) { |rank| train(rank, size, kind: kind, static_graph: true, bucket_cap_mb: 0.0002, &forward) }
      together.each { |each| one.zip(each).each { |expected, actual| assert_follows(expected, actual, 1e-10, kind.name) } }
    end
  end

  # Two forwards before one backward: every parameter gets its gradient twice.
  def test_static_graph_with_two_forwards_in_one_backward
    results = world(2) do |rank|
      net = Torch::NN::Linear.new(1, 1, bias: false)
      model = DDP.new(net, static_graph: true)
      3.times.map do
        net.zero_grad
        (model.call(Torch.tensor([[rank + 1.0]])) + model.call(Torch.tensor([[10.0]]))).sum.backward
        net.parameters.first.grad.sum.item
      end
    end
    assert_equal [[11.5] * 3] * 2, results
  end

  def test_a_graph_that_changes_although_it_was_promised_not_to_is_named
    said = world(2) do
      model = DDP.new(Branching.new, static_graph: true)
      failure { 4.times { |step| model.call(Torch.ones(2, 7), step < 2).sum.backward } }
    end
    said.each { |_, text| assert_match(/"?extra\.(weight|bias)|static_graph/, text) }
  end

  class TwoHeads < Torch::NN::Module
    def initialize
      super
      @trunk = Torch::NN::Linear.new(2, 3)
      @left = Torch::NN::Linear.new(3, 1)
      @right = Torch::NN::Linear.new(3, 1)
    end

    def forward(x)
      y = @trunk.call(x)
      [@left.call(y), @right.call(y)]
    end
  end

  # Two backwards of one forward: the trunk gets its gradient in both.
  def test_a_parameter_that_is_ready_twice_is_named
    said = world(2) do
      model = DDP.new(TwoHeads.new)
      failure do
        left, right = model.call(Torch.ones(1, 2))
        left.sum.backward(retain_graph: true)
        right.sum.backward
      end
    end
    said.each { |_, text| assert_match(/"trunk\.(weight|bias)".*twice|twice.*"trunk\.(weight|bias)"/m, text) }
  end

  def said_on_stderr
    reader, writer = IO.pipe
    before = $stderr.dup
    $stderr.reopen(writer)
    yield
    $stderr.reopen(before)
    writer.close
    reader.read
  ensure
    [reader, writer, before].each(&:close)
  end

  # Two forwards, then two backwards: the averages are made in the first one.
  def test_a_backward_too_many_is_told_once
    said = world(2) do
      model = DDP.new(TwoHeads.new)
      said_on_stderr do
        model.no_sync { 2.times { model.call(Torch.ones(1, 2)).map(&:sum).reduce(:+).backward } }
        2.times do
          losses = 2.times.map { model.call(Torch.ones(1, 2)).map(&:sum).reduce(:+) }
          losses.each(&:backward)
        end
      end
    end
    said.each_with_index do |text, rank|
      assert_equal 1, text.lines.size, text
      assert_match(/warn ddp: rank #{rank}: a gradient of "(trunk|left|right)\.(weight|bias)" was computed after the last forward's gradients were averaged, and is added on this rank only: run one forward for each backward/, text)
    end
  end

  # The same within no_sync and then in one backward is what works.
  def test_the_cure
    results = world(2) do |rank|
      net = TwoHeads.new
      model = DDP.new(net)
      2.times do
        net.zero_grad
        left, right = model.call(Torch.full([1, 2], rank + 1.0))
        (left + right).sum.backward
      end
      net.named_parameters.fetch("left.bias").grad.item
    end
    assert_equal [1.0, 1.0], results
  end
end
