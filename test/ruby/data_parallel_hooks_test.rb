# frozen_string_literal: true

require_relative "data_parallel_training"
require "weakref"

class DataParallelHooksTest < Minitest::Test
  include DataParallelTraining

  Hooks = Torch::Distributed::Algorithms::DDPCommHooks
  PeriodicModelAverager = Torch::Distributed::Algorithms::ModelAveraging::PeriodicModelAverager

  def self.expected
    @expected ||= yield
  end

  def expected
    self.class.expected { alone_trained }
  end

  def register(*arguments, &block)
    ->(model) { model.register_comm_hook(*arguments, &block) }
  end

  # The last of the arguments may be keywords.
  def registering(arguments)
    lambda do |model|
      *positional, last = arguments.call
      last.is_a?(Hash) ? model.register_comm_hook(*positional, **last) : model.register_comm_hook(*positional, last)
    end
  end

  # --- hooks that average exactly, in all the ways in which one may be given ---

  EXACT = {
    by_name: -> { [:allreduce] },
    by_name_with_a_state: -> { [nil, "allreduce"] },
    by_name_as_a_keyword: -> { [{hook: :allreduce}] },
    built_in: -> { [nil, Hooks.allreduce_hook] },
    of_the_library: -> { [Torch::Distributed::CommHook.allreduce] },
    power_sgd_before_it_starts: -> { [:power_sgd, {state: Hooks::PowerSGDState.new(start_power_sgd_iter: 100)}] },
    post_local_sgd_before_it_starts: -> { [{state: Hooks::PostLocalSGDState.new, hook: Hooks.post_local_sgd_hook}] },
    post_local_sgd_with_all: -> { [Hooks::PostLocalSGDState.new(subgroup: Distributed.default_process_group, start_local_sgd_iter: 2), Hooks.post_localSGD_hook] },
    ruby_work: -> { [2, ->(_, bucket) { Distributed.all_reduce(bucket.buffer, op: :avg, async_op: true) }] },
    ruby_future: -> { [nil, ->(_, bucket) { Distributed.all_reduce(bucket.buffer, async_op: true).get_future.then { |done| done.value.first / Distributed.get_world_size } }] },
    ruby_tensor: -> { [nil, ->(_, bucket) { Distributed.all_reduce(bucket.buffer / Distributed.get_world_size) }] },
    ruby_stages: lambda do
      stages = lambda do |_, bucket|
        half = bucket.buffer / 2
        Distributed.all_reduce(half, async_op: true).get_future
          .then { |done| Distributed.all_reduce(done.value.first / Distributed.get_world_size**2, async_op: true) }
          .then { |done| done.value.first * 2 }
      end
      [nil, stages]
    end,
    ruby_calling_a_built_in_one: -> { [nil, ->(state, bucket) { Hooks.allreduce_hook.call(state, bucket) }] }
  }.freeze

  EXACT.each_with_index do |(name, arguments), index|
    define_method(:"test_training_is_that_of_one_process_#{name}") do
      options = index.even? ? {bucket_cap_mb: 0.0002} : {gradient_as_bucket_view: false}
      assert_trains(expected, [2, 3, 4][index % 3], message: name, prepare: registering(arguments), **options)
    end
  end

  def test_a_block
    assert_trains(expected, 3, prepare: register { |state, bucket| state.nil? && Distributed.all_reduce(bucket.buffer, op: :avg, async_op: true) })
  end

  def test_who_gets_which_argument
    hook = ->(_, _) {}
    block = proc {}
    {
      [[hook], {}] => [nil, hook], [[hook], {state: 1}] => [1, hook], [[1, hook], {}] => [1, hook], [[nil, hook], {}] => [nil, hook],
      [[], {hook: hook}] => [nil, hook], [[], {hook: hook, state: 1}] => [1, hook], [[1], {hook: hook}] => [1, hook],
      [[], {block: block}] => [nil, block], [[1], {block: block}] => [1, block], [[], {state: 1, block: block}] => [1, block],
      [[:power_sgd], {}] => [nil, :power_sgd], [[], {}] => [nil, nil], [[1, nil], {}] => [1, nil]
    }.each do |(positional, given), expected|
      assert_equal expected, DDP.allocate.send(:comm_hook_arguments, positional, given[:state], given[:hook], given[:block])
    end
  end

  # --- hooks that lose something ---

  LOSSY = {
    fp16_compress: 5e-3, bf16_compress: 5e-2, quantize_per_tensor: 5e-2, quantize_per_channel: 5e-2,
    power_sgd: 1e-5, power_sgd_rank2: 1e-5, batched_power_sgd: 1e-5, batched_power_sgd_rank2: 1e-5
  }.freeze

  def test_every_name_is_one_that_is_known
    assert_equal Hooks::NAMES.sort, (LOSSY.keys + %i[allreduce noop]).sort
    Hooks::NAMES.each { |name| assert_equal name.to_s, Hooks.fetch(name).name }
  end

  def test_hooks_that_lose_something_come_close
    # PowerSGD by name begins after a thousand rounds, and averages until then.
    errors = world(2) do |rank|
      LOSSY.to_h do |name, _|
        Torch.manual_seed(3)
        net = Odd.new
        model = DDP.new(net, bucket_cap_mb: 0.0002)
        model.register_comm_hook(name)
        inputs = Torch.randn(2, 5, 7)
        3.times do
          net.zero_grad
          model.call(inputs[rank]).sum.backward
        end
        averaged = gradients(net)
        net.zero_grad
        model.no_sync { inputs.size(0).times { |index| (model.call(inputs[index]).sum / 2).backward } }
        exact = gradients(net)
        [name, exact.map { |key, values| norm(values.zip(averaged[key]).map { |a, b| a - b }) / norm(values) }.max]
      end
    end
    assert_equal errors[0], errors[1]
    LOSSY.each { |name, tolerance| assert_operator errors[0][name], :<=, tolerance, name }
  end

  def test_power_sgd_of_full_rank_is_exact_and_of_rank_one_is_not
    errors = world(2) do |rank|
      [[8, false], [1, false], [4, true]].map do |matrices, batched|
        Torch.manual_seed(3)
        net = Torch::NN::Linear.new(8, 8)
        net.double
        model = DDP.new(net)
        state = Hooks::PowerSGDState.new(matrix_approximation_rank: matrices, start_power_sgd_iter: 1, min_compression_rate: 0.01, use_error_feedback: false)
        model.register_comm_hook(state, batched ? Hooks.batched_powerSGD_hook : Hooks.powerSGD_hook)
        inputs = Torch.randn(2, 16, 8, dtype: :float64)
        6.times do
          net.zero_grad
          model.call(inputs[rank]).pow(2).sum.backward
        end
        averaged = net.weight.grad.clone
        net.zero_grad
        model.no_sync { 2.times { |index| (model.call(inputs[index]).pow(2).sum / 2).backward } }
        ((averaged - net.weight.grad).norm / net.weight.grad.norm).item
      end
    end
    assert_equal errors[0], errors[1]
    full, one, batched = errors[0]
    assert_operator full, :<, 1e-9
    assert_operator one, :>, 1e-3
    assert_operator one, :<, 1
    assert_operator batched, :<, 1
  end

  def test_wrappers
    sums = world(2) do |rank|
      [Hooks.fp16_compress_wrapper(Hooks.allreduce_hook), Hooks.bf16_compress_wrapper(Hooks.power_sgd_hook), Hooks.bf16_compress_wrapper(Torch::Distributed::CommHook.allreduce)].map do |hook|
        net = Torch::NN::Linear.new(1, 1, bias: false)
        model = DDP.new(net)
        model.register_comm_hook(hook)
        model.call(Torch.tensor([[rank + 1.0]])).sum.backward
        [hook.name, net.parameters.first.grad.sum.item]
      end
    end
    assert_equal [[["fp16_compress_wrapper(allreduce)", 1.5], ["bf16_compress_wrapper(power_sgd)", 1.5], ["bf16_compress_wrapper(allreduce)", 1.5]]] * 2, sums
  end

  def test_ranks_with_other_settings_are_told
    said = world(2) do |rank|
      model = DDP.new(Odd.new)
      model.register_comm_hook(Hooks.quantization_perchannel_hook(bucket_size: rank.zero? ? 512 : 1024))
      failure { model.call(Torch.ones(1, 7)).sum.backward }
    end
    said.each { |_, text| [512, 1024].each { |elements| assert_includes text, "quantize_per_channel (channels of #{elements} elements)" } }
  end

  def test_a_hook_in_ruby_on_one_rank_only_is_told
    said = world(2) do |rank|
      model = DDP.new(Odd.new)
      model.register_comm_hook { |_, bucket| Distributed.all_reduce(bucket.buffer, op: :avg, async_op: true) } if rank.zero?
      failure { model.call(Torch.ones(1, 7)).sum.backward }
    end
    said.each { |_, text| ["gradients through the communication hook ruby", "gradients without a communication hook"].each { |words| assert_includes text, words } }
  end

  def test_noop_and_post_local_sgd_keep_to_themselves
    results = world(4) do |rank|
      subgroup = Distributed.new_subgroups(2).first
      hooks = [
        [:noop], [Hooks::PostLocalSGDState.new(subgroup: subgroup, start_local_sgd_iter: 1), Hooks.post_local_sgd_hook],
        [Hooks::PostLocalSGDState.new(start_local_sgd_iter: 1, post_local_gradient_allreduce: false), Hooks.post_local_sgd_hook]
      ]
      hooks.map do |arguments|
        net = Torch::NN::Linear.new(1, 1, bias: false)
        model = DDP.new(net)
        model.register_comm_hook(*arguments)
        2.times.map do
          net.zero_grad
          model.call(Torch.tensor([[rank.to_f]])).sum.backward
          net.parameters.first.grad.sum.item
        end
      end
    end
    results.each_with_index do |(noop, halves, own), rank|
      assert_equal [[rank, rank], [1.5, (rank < 2) ? 0.5 : 2.5], [1.5, rank]], [noop, halves, own]
    end
  end

  # Locally from the third step on, averaged every second one: the last step is one after which all models are alike.
  def test_post_local_sgd_with_its_averager
    results = world(3) do |rank|
      Torch.manual_seed(1)
      net = Odd.new
      model = DDP.new(net)
      model.register_comm_hook(Hooks::PostLocalSGDState.new(start_local_sgd_iter: 2, post_local_gradient_allreduce: false), Hooks.post_local_sgd_hook)
      optimizer = Distributed::Optim::PostLocalSGDOptimizer.new(Torch::Optim::SGD.new(net.parameters, lr: 0.1), PeriodicModelAverager.new(period: 2, warmup_steps: 3))
      6.times.map do |step|
        optimizer.zero_grad
        model.call(Torch.full([2, 7], (rank + 1.0) * (step + 1) / 7)).pow(2).sum.backward
        optimizer.step
        numbers(net)
      end
    end
    same = 6.times.map { |step| results.map { |each| each[step] }.uniq.size }
    assert_equal [1, 1, 3, 1, 3, 1], same
  end

  # What runs for gradients on devices, here in the CPU's memory beside libtddp's.
  def test_power_sgd_in_ruby_trains_as_libtddps_does
    results = world(2) do |rank|
      state = Hooks::PowerSGDState.new(start_power_sgd_iter: 0, min_compression_rate: 1)
      in_ruby = Hooks.module_eval("PowerSGD", __FILE__, __LINE__).new(state.options, false, Distributed.default_process_group)
      [:allreduce, Hooks.power_sgd_hook, Torch::Distributed::CommHook.ruby(in_ruby)].map do |hook|
        Torch.manual_seed(1)
        model = DDP.new(Torch::NN::Sequential.new(Torch::NN::Linear.new(20, 40), Torch::NN::Tanh.new, Torch::NN::Linear.new(40, 5)))
        model.register_comm_hook(hook, state: (state if hook.is_a?(Hooks::BuiltIn)))
        optimizer = Torch::Optim::SGD.new(model.parameters, lr: 0.1)
        Torch.manual_seed(100 + rank)
        x = Torch.randn(64, 20)
        Array.new(60) do
          optimizer.zero_grad
          loss = (model.call(x) - (x.narrow(1, 0, 5) * 2).sin).pow(2).mean
          loss.backward
          optimizer.step
          loss.item
        end.values_at(0, -1)
      end
    end
    results.each do |(first, exact), (_, in_c), (_, in_ruby)|
      assert_operator exact, :<, 0.95 * first
      assert_in_delta in_c, in_ruby, 0.05 * (first - exact)
      refute_equal exact, in_ruby
    end
  end

  # --- Ruby ---

  def test_what_a_hook_sees
    seen = world(2) do
      net = Odd.new
      model = DDP.new(net, bucket_cap_mb: 0.0002)
      here = Thread.current
      seen = []
      model.register_comm_hook(:state) do |state, bucket|
        seen << {
          state: state, index: bucket.index, last: bucket.last?, thread: Thread.current.equal?(here),
          shapes: bucket.gradients.map(&:shape), parameters: bucket.parameters.map(&:shape), numbers: bucket.parameter_indices,
          size: bucket.buffer.shape, sum: bucket.gradients.sum { |gradient| gradient.sum.item } - bucket.buffer.sum.item
        }
        Distributed.all_reduce(bucket.buffer, op: :avg, async_op: true)
      end
      2.times { model.call(Torch.ones(1, 7)).sum.backward }
      [seen, model.bucket_sizes.size, net.named_parameters.keys]
    end
    (calls, buckets, names), other = seen
    assert_equal calls.map { |call| call.except(:sum) }, other[0].map { |call| call.except(:sum) }
    second = calls.last(buckets)
    assert_operator buckets, :>, 1
    assert_equal (0...buckets).to_a, second.map { |call| call[:index] }
    assert_equal [false] * (buckets - 1) + [true], second.map { |call| call[:last] }
    assert_equal [[:state, true]], calls.map { |call| call.values_at(:state, :thread) }.uniq
    calls.each do |call|
      assert_equal call[:shapes], call[:parameters]
      assert_operator call[:sum].abs, :<, 1e-4
      assert_equal 1, call[:size].size
    end
    assert_equal (0...names.size).to_a, second.flat_map { |call| call[:numbers] }.sort
  end

  def test_what_a_hook_raises_comes_out_of_backward
    said = world(2) do
      model = DDP.new(Odd.new)
      model.register_comm_hook { raise IOError, "the hook is broken" }
      failure { model.call(Torch.ones(1, 7)).sum.backward }
    end
    said.each { |_, text| assert_match(/the hook is broken/, text) }
    said = world(2) do
      model = DDP.new(Odd.new)
      model.register_comm_hook { |_, _| 3 }
      failure { model.call(Torch.ones(1, 7)).sum.backward }
    end
    said.each { |_, text| assert_match(/expected a Torch::Tensor, a Future or a Work, got 3/, text) }
  end

  def test_a_hook_that_is_left_by_throw_ends_backward
    said = world(1) do
      model = DDP.new(Odd.new)
      model.register_comm_hook { throw :out }
      catch(:out) { failure { model.call(Torch.ones(1, 7)).sum.backward } }
    end
    assert_match(/a communication hook raised UncaughtThrowError: uncaught throw :out/, said.first.last)
  end

  # --- interrupts ---

  # What a hook waits for: its result at the end of backward, or an operation of its own in its midst.
  WAITING = {
    a_work: ->(bucket) { Distributed.all_reduce(bucket.buffer, op: :avg, async_op: true) },
    a_future: ->(bucket) { Distributed.all_reduce(bucket.buffer, async_op: true).get_future.then { |done| done.value.first / 2 } },
    an_operation: ->(bucket) { Distributed.all_reduce(bucket.buffer.div!(2)) },
    two_operations: lambda do |bucket|
      half = bucket.buffer / 2
      2.times { Distributed.all_reduce(half.div!(2)) }
      half * 2
    end,
    a_work_in_its_midst: lambda do |bucket|
      Distributed.all_reduce(half = bucket.buffer / 2, async_op: true).wait
      half
    end
  }.freeze

  class Two < Torch::NN::Module
    def initialize
      super
      @first, @second = Array.new(2) { Torch::NN::Linear.new(3, 1, bias: false) }
    end

    def forward(x)
      @first.call(x) + @second.call(x)
    end
  end

  # Runs the block, which is ended by an exception of another thread, or of a signal's handler, that comes once `called`
  # says yes and this thread waits.
  #
  # @return [true] when it has come
  def interrupt(by_signal, called, interrupted = nil)
    main = Thread.current
    trap("USR1") { raise IOError, "enough" }
    Thread.new do
      await("a hook that waits") { called.call && main.stop? }
      by_signal ? Process.kill(:USR1, Process.pid) : main.raise(IOError, "enough")
      interrupted&.set
    end
    begin
      yield
    rescue Distributed::CanceledError
      nil # Backward has an error of its own; the other may come with it or after it.
    end
    sleep
  rescue IOError
    true
  end

  # Three rounds of two ranks, and one between in which rank 0 is interrupted once its hook was called.
  #
  # @yield [bucket, watched] the hook
  # @yieldparam watched [Boolean] whether it is the one that is interrupted
  # @return [Array] for each rank, averages before, whether it was interrupted, averages after
  def rounds_with_an_interrupt(by_signal:, raised: nil)
    interrupted = Event.new
    world(2) do |rank|
      net = Two.new
      model = DDP.new(net, bucket_cap_mb: 0.000004)
      watched = called = false
      model.register_comm_hook do |_, bucket|
        called = watched
        yield bucket, watched
      end
      average = lambda do
        loss = model.call(Torch.full([1, 3], rank + 1.0)).sum
        net.zero_grad
        loss.backward
        net.parameters.flat_map { |parameter| parameter.grad.to_a.flatten }
      end
      before = Array.new(2) { average.call }
      if rank.zero?
        watched = true
        ended = interrupt(by_signal, -> { called }, raised) { average.call }
        watched = false
        interrupted.set
      else
        interrupted.wait
        average.call
      end
      [before, ended, average.call, average.call]
    end
  end

  HALVES = [1.5] * 6
  RECOVERED = [[[HALVES] * 2, true, HALVES, HALVES], [[HALVES] * 2, nil, HALVES, HALVES]].freeze

  # The other rank comes to its backward after the interrupt. The next forward goes on with the hook where it was.
  WAITING.each_with_index do |(name, hook), index|
    define_method(:"test_a_hook_that_was_interrupted_goes_on_#{name}") do
      assert_equal RECOVERED, rounds_with_an_interrupt(by_signal: index.even?) { |bucket, _| hook.call(bucket) }
    end

    # The exception comes while the hook does something else: before it waits for an operation, or after all.
    define_method(:"test_a_hook_s_own_code_is_not_unwound_#{name}") do
      raised = Event.new
      results = rounds_with_an_interrupt(by_signal: false, raised: raised) do |bucket, watched|
        raised.wait if watched
        hook.call(bucket)
      end
      assert_equal RECOVERED, results
    end
  end

  def test_gradients_of_later_rounds_are_not_the_hooks_memory
    results = world(2) do |rank|
      net = Torch::NN::Linear.new(3, 1, bias: false)
      model = DDP.new(net)
      kept = Torch.zeros(3)
      model.register_comm_hook do |_, bucket|
        kept.copy!(bucket.buffer.narrow(0, 0, 3))
        bucket.buffer * 2
      end
      model.call(Torch.full([1, 3], rank + 1.0)).sum.backward
      [kept.to_a, net.parameters.first.grad.to_a]
    end
    assert_equal [[[1.0] * 3, [[2.0] * 3]], [[2.0] * 3, [[4.0] * 3]]], results
  end

  # --- mistakes ---

  # Most hooks refer to their model, for their block knows the variable; the collector has to see through that.
  def test_a_model_and_the_hook_that_refers_to_it_are_collected_together
    left = world(1) do
      made = Array.new(30) do
        model = DDP.new(Odd.new)
        model.register_comm_hook { |_, bucket| model.training ? bucket.buffer : nil }
        model.call(Torch.ones(2, 7)).sum.backward
        WeakRef.new(model)
      end
      # A few may still be seen on the stack.
      3.times { GC.start }
      made.count(&:weakref_alive?)
    end
    assert_operator left.first, :<, 10
  end

  def test_a_hook_is_kept_by_its_model_and_by_the_hook_around_it
    kept = world(1) do
      model = DDP.new(Odd.new)
      model.register_comm_hook(Torch::Distributed::CommHook.compress(:float16, Torch::Distributed::CommHook.ruby(->(bucket) { bucket.buffer })))
      3.times { GC.start }
      Array.new(1000) { _1.to_s * 10 }
      2.times { model.call(Torch.ones(2, 7)).sum.backward }
      model.module.parameters.all?(&:grad)
    end
    assert_equal [true], kept
  end

  def test_mistakes_are_named
    alone do
      model = DDP.new(Odd.new)
      assert_match(/hook: expected one of :allreduce, .*got :fp8/, assert_raises(ArgumentError) { model.register_comm_hook(:fp8) }.message)
      assert_match(/hook: expected a name .*got 3/, assert_raises(ArgumentError) { model.register_comm_hook(nil, 3) }.message)
      assert_match(/hook: expected a name .*got nil/, assert_raises(ArgumentError) { model.register_comm_hook }.message)
      {
        /got both/ => [-> { model.register_comm_hook(nil, :noop) {} }, -> { model.register_comm_hook(hook: :noop) {} }],
        /got 3 arguments/ => [-> { model.register_comm_hook(1, :noop, 2) }],
        /state: expected it once/ => [-> { model.register_comm_hook(1, :noop, state: 2) }, -> { model.register_comm_hook(1, state: 2) {} }],
        /hook: expected it once/ => [-> { model.register_comm_hook(1, :noop, hook: :noop) }]
      }.each { |text, calls| calls.each { |call| assert_match(text, assert_raises(ArgumentError, &call).message) } }
      assert_match(/state: expected a .*PostLocalSGDState .*got nil/, assert_raises(ArgumentError) { model.register_comm_hook(nil, Hooks.post_local_sgd_hook) }.message)
      assert_match(/state: expected a .*PowerSGDState .*got 3/, assert_raises(ArgumentError) { model.register_comm_hook(3, Hooks.power_sgd_hook) }.message)
      model.register_comm_hook(:noop)
      assert_match(/there is one already, noop/, assert_raises(ArgumentError) { model.register_comm_hook(:noop) }.message)
      assert_match(/divide_by_initial_world_size: expected true, .*noop/, assert_raises(ArgumentError) { model.join(divide_by_initial_world_size: false) {} }.message)
      assert_match(/matrix_approximation_rank: .*got 0/, assert_raises(ArgumentError) { Hooks::PowerSGDState.new(matrix_approximation_rank: 0) }.message)
      assert_match(/bucket_size: .*got 0/, assert_raises(ArgumentError) { Hooks.quantization_perchannel_hook(bucket_size: 0) }.message)
      assert_match(/one in Ruby casts its bucket/, assert_raises(ArgumentError) { Hooks.fp16_compress_wrapper(->(_, _) {}) }.message)
      assert_match(/expected to be registered/, assert_raises(ArgumentError) { Hooks.power_sgd_hook.call(nil, nil) }.message)
    end
    said = world(2) do
      model = DDP.new(Odd.new)
      model.call(Torch.ones(1, 7)).sum.backward
      failure { model.register_comm_hook(:noop) }
    end
    said.each { |_, text| assert_match(/before the first backward, there were 1/, text) }
  end
end
