# frozen_string_literal: true

require_relative "data_parallel_training"

# Which gradients are averaged: those of a synchronised forward, whatever runs between it and its backward, and none of a
# backward inside forward.
class DataParallelRoundsTest < Minitest::Test
  include DataParallelTraining

  MODES = {
    plain: {},
    find_unused: {find_unused_parameters: true},
    static_graph: {static_graph: true},
    apart: {gradient_as_bucket_view: false}
  }.freeze

  # One weight of 1; its gradient is the sum of the inputs.
  class Single < Torch::NN::Module
    def initialize
      super
      @weight = Torch::NN::Parameter.new(Torch.ones(1))
    end

    def forward(x)
      raise ArgumentError, "a bad batch" if x.nil?

      @weight * x
    end
  end

  # As MAML, or an energy model: a gradient step inside forward.
  class Inner < Single
    attr_reader :inner

    def forward(x)
      Torch.enable_grad { super.sum.backward }
      @inner = @weight.grad.to_a
      @weight.grad.zero!
      super
    end
  end

  def input(rank)
    Torch.tensor([rank + 1.0])
  end

  def weight(model)
    model.parameters.first
  end

  def grad(model)
    weight(model).grad.to_a.first
  end

  # Each rank's result for every way of wrapping; all are run in one world.
  def in_all_modes(kind, modes = MODES)
    world(2) do |rank|
      modes.transform_values { |options| yield DDP.new(kind.new, **options), rank }
    end
  end

  def test_a_backward_inside_forward_stays_local_and_the_outer_one_is_averaged
    results = in_all_modes(Inner) do |model, rank|
      Array.new(3) do
        model.zero_grad
        model.call(input(rank)).sum.backward
        [model.module.inner, grad(model)]
      end
    end
    results.each_with_index do |modes, rank|
      modes.each { |name, steps| assert_equal [[[rank + 1.0], 1.5]] * 3, steps, "#{name} on rank #{rank}" }
    end
  end

  def test_a_forward_within_no_sync_leaves_the_open_round_alone
    results = in_all_modes(Single) do |model, rank|
      Array.new(3) do
        model.zero_grad
        output = model.call(input(rank))
        model.no_sync { model.call(input(rank) * 10) }
        output.sum.backward
        grad(model)
      end
    end
    results.each { |modes| modes.each { |name, steps| assert_equal [1.5] * 3, steps, name } }
  end

  # Neither forward opens a round of its own, nor do they disturb the one that is open. The inner gradients of the second stay
  # local, too.
  BETWEEN = {
    nothing: ->(_, _) {},
    no_grad: ->(model, x) { Torch.no_grad { model.call(x) } },
    no_sync: ->(model, x) { model.no_sync { model.call(x) } },
    evaluation: ->(model, x) { Torch.no_grad { model.eval.call(x) } && model.train },
    failure: ->(model, _) { model.call(nil) rescue ArgumentError }, # standard:disable Style/RescueModifier
    failure_within_no_sync: ->(model, _) { model.no_sync { model.call(nil) } rescue ArgumentError } # standard:disable Style/RescueModifier
  }.freeze

  def test_what_runs_between_a_forward_and_its_backward
    results = in_all_modes(Inner, MODES.slice(:plain, :find_unused)) do |model, rank|
      BETWEEN.transform_values do |between|
        model.zero_grad
        output = model.call(input(rank))
        between.call(model, input(rank) * 10)
        output.sum.backward
        grad(model)
      end
    end
    results.each { |modes| modes.each { |mode, grads| grads.each { |name, value| assert_equal 1.5, value, "#{mode} #{name}" } } }
  end

  # As in PyTorch the place of forward counts.
  def test_no_sync_concerns_forwards_and_not_backwards
    results = in_all_modes(Single, MODES.slice(:plain, :find_unused)) do |model, rank|
      output = model.call(input(rank))
      model.no_sync { output.sum.backward }
      inside = grad(model)
      output = model.no_sync { model.call(input(rank)) }
      output.sum.backward
      [inside, grad(model)]
    end
    results.each_with_index { |modes, rank| modes.each { |name, grads| assert_equal [1.5, 2.5 + rank], grads, name } }
  end

  # Each rank then trains on alone, and is told so.
  def test_a_round_that_failed_does_not_outlive_its_error
    results = world(2) do |rank|
      model = DDP.new(Single.new)
      model.register_comm_hook { raise IOError, "broken" }
      said = failure { model.call(input(rank)).sum.backward }.last
      again = failure { model.call(input(rank)) }.last
      model.zero_grad
      model.no_sync { model.call(input(rank)).sum.backward }
      [said, again, grad(model)]
    end
    results.each_with_index do |(said, again, grad), rank|
      assert_match(/broken/, said)
      assert_match(/gradients of an earlier step were not averaged/, again)
      assert_equal rank + 1.0, grad
    end
  end

  def test_a_round_that_freezing_ends_is_told
    said = world(2) do |rank|
      reader, writer = IO.pipe
      model = DDP.new(Torch::NN::Linear.new(1, 1))
      before = $stderr
      $stderr = writer
      output = model.call(Torch.ones(1, 1))
      model.module.bias.requires_grad!(false)
      model.call(Torch.ones(1, 1)).sum.backward
      $stderr = before
      writer.close
      output && reader.read
    end
    said.each_with_index { |text, rank| assert_match(/\Arank #{rank}: parameters were frozen.*between a forward and its backward/, text) }
  end

  # --- rounds that a backward left behind ---

  # All gradients are there when what lies before the model fails in backward: the next forward makes the averages, and the hook
  # in Ruby, whose first half has run, is called on its own thread.
  def test_a_round_left_with_a_hook_in_ruby_is_finished_by_the_next_forward
    results = world(2) do |rank|
      model = DDP.new(Single.new)
      model.register_comm_hook { |_, bucket| Distributed.all_reduce(bucket.buffer, op: :avg, async_op: true) }
      [true, false].map do |sync|
        runs = 0
        model.zero_grad
        below = Torch::Utils::Checkpoint.checkpoint(input(rank)) { |x| ((runs += 1) == 1) ? x * 1 : raise(IOError, "below the model") }
        said = failure { model.call(below).sum.backward }.last
        sync ? model.call(input(rank)) : model.no_sync { model.call(input(rank)) }
        averaged = grad(model)
        model.call(input(rank)).sum.backward
        [said[/below the model/], averaged, grad(model)]
      end
    end
    assert_equal [[["below the model", 1.5, 3.0]] * 2] * 2, results
  end

  # --- threads of Ruby ---

  # Rank 1 waits for rank 0's order of gradients, which comes once its core has been released.
  def test_a_core_that_is_released_while_another_thread_prepares
    released = Event.new
    said = world(2) do |rank|
      model = DDP.new(Single.new)
      model.call(input(rank)).sum.backward
      if rank.zero?
        released.wait
        model.call(input(rank))
        next
      end
      thread = Thread.new { failure { model.call(input(rank)) } }
      await_waiting(thread)
      model.instance_variable_get(:@core).release
      released.set
      thread.value
    end
    assert_match(/core of a DistributedDataParallel was released/, said.last.last)
  end

  # A user who may have one task has no second thread.
  def without_more_threads
    before = Process.getrlimit(:NPROC)
    if Process.uid.zero?
      Process::Sys.setresuid(65_534, 65_534, 0)
    end
    Process.setrlimit(:NPROC, 1, before.last)
    # Ruby 3.3 would hand the GVL to the thread that could not be started.
    assert_raises(ThreadError) { Thread.new {} } if RUBY_VERSION < "3.3"
    yield
  ensure
    Process.setrlimit(:NPROC, *before)
  end

  def test_a_forward_with_buffers_starts_no_thread
    means = world(2) do |rank|
      model = DDP.new(Normed.new)
      mean = model.module.instance_variable_get(:@norm).running_mean
      3.times { model.call(Torch.full([4, 3], rank + 1.0)).sum.backward }
      mean.fill!(rank + 7.0)
      without_more_threads { model.call(Torch.full([4, 3], 0.0)) }
      mean.to_a
    end
    assert_equal means[0], means[1]
  end
end
