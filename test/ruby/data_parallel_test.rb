# frozen_string_literal: true

require_relative "data_parallel_training"

class DistributedDataParallelTest < Minitest::Test
  include DataParallelTraining

  # A hundred steps of SGD; each process takes its share of every batch.
  def train(dtype, rank, size, steps: 100, **options)
    Torch.manual_seed(7)
    net = Odd.new
    net.double if dtype == :float64
    inputs = Torch.randn(steps, 12, 7, dtype: dtype)
    targets = Torch.randn(steps, 12, 3, dtype: dtype)
    model = (size > 1) ? DDP.new(net, **options) : net
    optimizer = Torch::Optim::SGD.new(model.parameters, lr: 0.1)
    share = 12 / size
    steps.times do |step|
      optimizer.zero_grad
      output = model.call(inputs[step].narrow(0, rank * share, share))
      F.mse_loss(output, targets[step].narrow(0, rank * share, share)).backward
      optimizer.step
    end
    numbers(model)
  end

  TOLERANCE.each do |dtype, tolerance|
    define_method(:"test_processes_with_shares_of_a_batch_follow_one_with_the_whole_#{dtype}") do
      alone = Distributed.fork_world(1) { train(dtype, 0, 1) }.first
      start = Distributed.fork_world(1) { train(dtype, 0, 1, steps: 0) }.first
      [[2, {}], [3, {}], [3, {bucket_cap_mb: 0.0002}]].each do |size, options|
        together = world(size) { |rank| train(dtype, rank, size, **options) }
        assert_equal 1, together.uniq.size, "ranks differ"
        assert_follows alone, together[0], tolerance, "#{size} processes"
        alone.each { |name, expected| refute_equal start.fetch(name), expected }
      end
    end
  end

  def test_gradients_are_means
    results = world(2) do |rank|
      model = DDP.new(Torch::NN::Linear.new(1, 1, bias: false))
      model.call(Torch.tensor([[rank + 1.0]])).sum.backward
      first = model.parameters.first.grad.sum.item
      model.call(Torch.tensor([[rank + 1.0]])).sum.backward
      [first, model.parameters.first.grad.sum.item]
    end
    assert_equal [[1.5, 3.0]] * 2, results
  end

  def test_no_sync_accumulates_locally_and_the_next_backward_averages_the_sum
    results = world(2) do |rank|
      model = DDP.new(Torch::NN::Linear.new(1, 1, bias: false))
      run = -> { model.call(Torch.tensor([[rank + 1.0]])).sum.backward }
      given = model.no_sync do
        run.call
        run.call
        :value
      end
      local = model.parameters.first.grad.sum.item
      run.call
      [given, local, model.parameters.first.grad.sum.item]
    end
    assert_equal [[:value, 2.0, 4.5], [:value, 4.0, 4.5]], results
  end

  def test_all_start_from_rank_zeros_parameters_and_buffers
    results = world(3) do |rank|
      Torch.manual_seed(rank)
      net = Normed.new
      net.instance_variable_get(:@norm).running_mean.fill!(rank + 1.0)
      frozen = net.instance_variable_get(:@linear).bias
      frozen.requires_grad!(false)
      before = numbers(net)
      model = DDP.new(net)
      [before, numbers(model), model.state_dict.fetch("module.norm.running_mean").to_a]
    end
    assert_equal 3, results.map(&:first).uniq.size
    results.each { |_, after, mean| assert_equal [results[0][0], [1.0] * 4], [after, mean] }
  end

  def test_buffers_follow_rank_zero_in_training
    train = lambda do |rank, **options|
      Torch.manual_seed(1)
      model = DDP.new(Normed.new, **options)
      mean = model.module.instance_variable_get(:@norm).running_mean
      model.call(Torch.full([4, 3], rank + 1.0)).sum.backward
      own = mean.to_a
      model.call(Torch.full([4, 3], 5.0)).sum.backward
      model.eval
      mean.fill!(rank)
      model.call(Torch.ones(2, 3))
      [own, mean.to_a]
    end
    shared = world(2) { |rank| train.call(rank) }
    refute_equal shared[0][0], shared[1][0]
    assert_equal [[0.0] * 4, [1.0] * 4], shared.map(&:last), "evaluation leaves buffers alone"
    after = world(2) do |rank|
      model = DDP.new(Normed.new)
      mean = model.module.instance_variable_get(:@norm).running_mean
      mean.fill!(rank + 7.0)
      model.call(Torch.zeros(4, 3))
      same = (mean.to_a.sum > 4 * 6 * 0.9) ? mean.to_a : nil
      apart = DDP.new(Normed.new, broadcast_buffers: false)
      apart.module.instance_variable_get(:@norm).running_mean.fill!(rank)
      apart.call(Torch.zeros(4, 3))
      [same, apart.module.instance_variable_get(:@norm).running_mean.to_a.map(&:round)]
    end
    assert_equal after[0][0], after[1][0]
    refute_equal after[0][1], after[1][1]
  end

  def test_it_is_a_module
    world(1) do
      net = Odd.new
      model = DDP.new(net)
      raise "parameters" unless model.parameters.map(&:object_id) == net.parameters.map(&:object_id)
      raise "keys" unless model.state_dict.keys == net.state_dict.keys.map { |key| "module.#{key}" }
      raise "module" unless model.module.equal?(net) && model.process_group.equal?(Distributed.default_process_group)

      other = DDP.new(Odd.new)
      other.load_state_dict(model.state_dict)
      raise "load" unless numbers(other) == numbers(model)
      raise "eval" unless model.eval.equal?(model) && !net.training && !model.training
      raise "train" unless model.train.equal?(model) && net.training
      raise "inspect" unless model.inspect.match?(/\A#<Torch::NN::Parallel::DistributedDataParallel of a \S*Odd>\z/)

      Torch.no_grad { model.call(Torch.ones(1, 7)) }
      model.double
      model.call(Torch.ones(2, 7, dtype: :float64)).sum.backward
      raise "converted" unless model.parameters.all? { |parameter| parameter.dtype == :float64 && parameter.grad }
    end
  end

  def test_a_parameter_of_two_modules_counts_once
    results = world(2) do |rank|
      first = Torch::NN::Linear.new(2, 2, bias: false)
      second = Torch::NN::Linear.new(2, 2, bias: false)
      second.instance_variable_set(:@weight, first.weight)
      Torch.no_grad { first.weight.copy!(Torch.eye(2)) }
      model = DDP.new(Torch::NN::Sequential.new(first, second))
      model.call(Torch.full([1, 2], rank + 1.0)).sum.backward
      first.weight.grad.to_a
    end
    assert_equal results[0], results[1]
    assert_equal [[6.0, 6.0], [6.0, 6.0]].map { |row| row.map { |value| value * 0.5 } }, results[0]
  end

  def test_buckets
    sizes = world(1) do
      default, small = [{}, {bucket_cap_mb: 0.5}].map do |options|
        layers = Array.new(4) { Torch::NN::Linear.new(300, 300) }
        DDP.new(Torch::NN::Sequential.new(*layers), **options)
      end
      [default, small].map do |model|
        before = model.bucket_sizes
        2.times { model.call(Torch.ones(1, 300)).sum.backward }
        [before, model.bucket_sizes]
      end
    end.first
    layer = (300 * 300 + 300) * 4
    assert_equal [[4 * layer], [4 * layer]], sizes.map { |before, _| [before.sum] }
    assert_equal [[4 * layer], [3, 1]], [sizes[0][0], sizes[0][1].map { |bytes| (bytes.to_f / layer).round }]
    assert_equal [2, 2], sizes[1][1].map { |bytes| (bytes.to_f / layer).round }
  end

  def test_models_that_differ_are_told_apart
    cases = {
      [[7, 3], [7, 4]] => /weight.*\b(rank|ranks)\b.*0.*1|0.*1.*weight/m,
      [[7, 3], [7, 3, false]] => /2.*1|1.*2/m
    }
    cases.each do |(first, second), text|
      said = world(2) do |rank|
        features, outputs, bias = rank.zero? ? first : second
        failure { DDP.new(Torch::NN::Linear.new(features, outputs, bias: bias != false)) }
      end
      said.each do |name, message|
        assert_equal "Torch::Distributed::MismatchError", name
        assert_match text, message
      end
    end
    said = world(2) do |rank|
      net = Torch::NN::Linear.new(2, 2)
      failure { DDP.new(rank.zero? ? net : net.double) }
    end
    said.each { |_, message| assert_match(/float32.*float64|float64.*float32/, message) }
  end

  def test_a_parameter_without_a_gradient_is_named_at_the_next_forward
    said = world(1) do
      net = Odd.new
      unused = net.instance_variable_get(:@second)
      net.define_singleton_method(:forward) { |x| @first.call(x) }
      model = DDP.new(net)
      2.times.map { failure { model.call(Torch.ones(1, 7)).sum.backward } } + [unused.class.name]
    end.first
    assert_nil said[0]
    assert_match(/second\.weight/, said[1].last)
  end

  # Also where buffers are sent before each forward, and to the rank that waits for the missing gradient.
  def test_a_parameter_without_a_gradient_on_one_rank_ends_both
    said = world(2) do |rank|
      net = Normed.new
      linear = net.instance_variable_get(:@linear)
      bypassed = rank == 1
      net.define_singleton_method(:forward) { |x| @norm.call(bypassed ? x.matmul(Torch.ones(3, 4)) : linear.call(x)) }
      model = DDP.new(net)
      failure { 3.times { model.call(Torch.randn(5, 3)).sum.backward } }
    end
    assert_match(/lost rank 1|rank 1 .*has destroyed the group|operation .*rank 1/, said[0].last)
    assert_match(/rank 1: 2 of 4 parameters got no gradient .*"linear\.weight", "linear\.bias"/, said[1].last)
  end

  # Large enough for the first wrapper's bucket to be on its way while the second one still copies.
  def test_a_model_that_is_wrapped_twice_is_averaged_by_both
    errors = world(2) do |rank|
      net = Torch::NN::Linear.new(1000, 700)
      input = Torch.ones(2, 1000) * (rank + 1)
      first = DDP.new(net)
      second = DDP.new(net)
      40.times.map do |step|
        net.zero_grad
        first.call(input)
        (step.even? ? second.call(input).sum : second.call(input).sum + first.call(input).sum).backward
        (net.parameters.first.grad - (step.even? ? 3 : 6)).abs.max.item
      end
    end
    assert_equal [[0.0] * 40] * 2, errors
  end

  def test_wrong_arguments_are_named
    assert_match(/init_process_group/, assert_raises(Distributed::GroupError) { DDP.new(Odd.new) }.message)
    alone do
      assert_match(/mod: expected .*got nil/, assert_raises(TypeError) { DDP.new(nil) }.message)
      assert_match(/device_ids: expected the one device.*got 2/, assert_raises(ArgumentError) { DDP.new(Odd.new, device_ids: [0, 1]) }.message)
      assert_match(/bucket_cap_mb: .*got -1/, assert_raises(ArgumentError) { DDP.new(Odd.new, bucket_cap_mb: -1) }.message)
      assert_match(/bucket_cap_mb: .*got Infinity/,
        assert_raises(ArgumentError) { DDP.new(Odd.new, bucket_cap_mb: Float::INFINITY) }.message)
      assert_match(/no parameter of the .*Odd requires a gradient/,
        assert_raises(ArgumentError) { DDP.new(Odd.new.requires_grad!(requires_grad: false)) }.message)
      skip "there is a GPU" if Torch::CUDA.available?
      assert_match(/there is no GPU 0 here/, assert_raises(ArgumentError) { DDP.new(Odd.new, device_ids: [0]) }.message)
    end
  end

  def test_a_worker_killed_in_training_ends_the_other
    name, text = Distributed.fork_world(1) do
      dying = fork { train_for_ever(1) }
      Thread.new { await("some steps") { @steps.to_i > 20 } && Process.kill(:KILL, dying) }
      failure { train_for_ever(0) }
    ensure
      Process.wait(dying)
    end.first
    assert_match(/PeerLostError|GroupError/, name)
    assert_match(/lost rank 1 \(.*\): its process has ended/, text)
  end

  def train_for_ever(rank)
    Distributed.init_process_group("gloo", rank: rank, world_size: 2, timeout: LIMIT)
    model = DDP.new(Odd.new)
    optimizer = Torch::Optim::SGD.new(model.parameters, lr: 0.01)
    loop do
      optimizer.zero_grad
      model.call(Torch.randn(4, 7)).sum.backward
      optimizer.step
      @steps = @steps.to_i + 1
    end
  end

  def test_ctrl_c_in_backward
    handled_twice = Event.new
    said = world(2) do |rank|
      model = DDP.new(Odd.new)
      model.call(Torch.ones(1, 7)).sum.backward
      handled = 0
      trap("USR1") { handled += 1 }
      if rank == 1
        handled_twice.wait
        model.call(Torch.ones(1, 7)).sum.backward
        next sleep
      end
      when_waiting do |waiting|
        (1..2).each do |count|
          await_waiting(waiting)
          Process.kill(:USR1, Process.pid)
          await("the handler") { handled == count }
        end
        handled_twice.set
      end
      model.call(Torch.ones(1, 7)).sum.backward
      loss = model.call(Torch.ones(1, 7)).sum
      when_waiting { Process.kill(:INT, Process.pid) }
      begin
        begin
          loss.backward
        ensure
          sleep LIMIT unless $!.is_a?(Interrupt) # which arrives here, if not before
        end
      rescue Interrupt
        raise "interrupted, #{handled} signals handled"
      end
    end
    flunk said.inspect
  rescue Distributed::WorkerError => e
    assert_match(/interrupted, 2 signals handled/, e.message)
  end

  # The other rank comes only after the interrupted one has gone on without synchronisation.
  def test_what_is_added_after_an_interrupted_backward_waits_for_its_averages
    gone_on = Event.new
    sums = world(2) do |rank|
      net = Torch::NN::Linear.new(1000, 1000, bias: false)
      model = DDP.new(net)
      run = -> { model.call(Torch.ones(1, 1000) * (rank + 1)).sum.backward }
      2.times { net.zero_grad and run.call }
      net.zero_grad
      if rank.zero?
        loss = model.call(Torch.ones(1, 1000)).sum
        when_waiting { |waiting| waiting.raise(IOError) }
        error = assert_raises(Distributed::CanceledError, IOError) { loss.backward }
        assert_raises(IOError) { sleep LIMIT } unless error.is_a?(IOError) # which comes later then
      else
        gone_on.wait
        run.call
      end
      when_waiting { gone_on.set } if rank.zero?
      model.no_sync(&run)
      grad = net.parameters.first.grad
      [grad.min.item, grad.max.item]
    end
    assert_equal [[2.5, 2.5], [3.5, 3.5]], sums
  end

  def test_a_forked_child_is_told_that_the_group_is_its_parents
    said = world(1) do
      model = DDP.new(Odd.new)
      reader, writer = IO.pipe
      child = fork { writer.puts failure { model.call(Torch.ones(1, 7)).sum.backward } }
      writer.close
      Process.wait(child)
      reader.read
    end.first
    assert_match(/was made by process \d+, this is its child \d+/, said)
  end

  def test_timeout_in_backward
    said = nil
    world(2) do |rank|
      model = DDP.new(Odd.new)
      model.call(Torch.ones(1, 7)).sum.backward
      next sleep if rank == 1

      begin
        Timeout.timeout(0.3) { model.call(Torch.ones(1, 7)).sum.backward }
      rescue => e
        said = e.class.name
      end
      raise "#{said} in backward"
    end
  rescue Distributed::WorkerError => e
    assert_match(/Timeout::Error in backward/, e.message)
  end

  # A model keeps its group, but not the place where the next one of the same address is hosted.
  def test_a_model_that_is_still_there_is_in_no_later_group_s_way
    kept = []
    ranks = Distributed.fork_world(2) do |rank, port|
      Array.new(2) do |time|
        Distributed.init_process_group("gloo", init_method: "tcp://127.0.0.1:#{port}", rank: rank, world_size: 2, timeout: 20)
        kept << (model = DDP.new(Torch::NN::Linear.new(2, 1, bias: false)))
        model.call(Torch.ones(1, 2) * (rank + time)).sum.backward
        Distributed.destroy_process_group
        model.module.weight.grad.to_a
      end
    end
    assert_equal [[[[0.5, 0.5]], [[1.5, 1.5]]]] * 2, ranks
  end
end
