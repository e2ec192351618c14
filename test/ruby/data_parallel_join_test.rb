# frozen_string_literal: true

require_relative "data_parallel_training"

class DataParallelJoinTest < Minitest::Test
  include DataParallelTraining

  # Rank r has r more batches than rank 0.
  def uneven(rank, size, net, steps: 2, optimizer: true, options: {}, **join)
    Torch.manual_seed(5)
    batches = Torch.randn(size, steps + size, 3, 7, dtype: :float64)
    net.double
    model = DDP.new(net, **options)
    sgd = Torch::Optim::SGD.new(net.parameters, lr: 0.05)
    model.join(**join) do
      (steps + rank).times do |step|
        sgd.zero_grad
        yield(model, batches[rank][step]).backward
        sgd.step
      end
    end
    [numbers(net), batches.to_a]
  end

  # What one process does with all of that: in each step the sum of the batches that are left, divided.
  def alone_uneven(net, batches, size, steps, divide_by_initial)
    net.double
    sgd = Torch::Optim::SGD.new(net.parameters, lr: 0.05)
    (steps + size - 1).times do |step|
      left = (0...size).select { |rank| step < steps + rank }
      sgd.zero_grad
      left.sum { |rank| net.call(batches[rank][step]).pow(2).sum / (divide_by_initial ? size : left.size) }.backward
      sgd.step
    end
    numbers(net)
  end

  {plain: {}, find_unused: {find_unused_parameters: true}, static_graph: {static_graph: true},
   skip_unused: {find_unused_parameters: true, skip_all_reduce_unused_params: true},
   apart: {gradient_as_bucket_view: false, bucket_cap_mb: 0.0002}}.each_with_index do |(name, options), index|
    [true, false].each do |initial|
      define_method(:"test_uneven_batches_are_those_of_one_process_#{name}_#{initial ? "by_all" : "by_active"}") do
        size = 2 + index % 3
        steps = index.odd? ? 2 : 0
        make = lambda do
          Torch.manual_seed(2)
          Odd.new
        end
        results = world(size) do |rank|
          uneven(rank, size, make.call, steps: steps, options: options, divide_by_initial_world_size: initial) { |model, input| model.call(input).pow(2).sum }.first
        end
        expected = Distributed.fork_world(1) do
          net = make.call
          Torch.manual_seed(5)
          batches = Torch.randn(size, steps + size, 3, 7, dtype: :float64)
          alone_uneven(net, batches, size, steps, initial)
        end.first
        results.each_with_index { |result, rank| assert_follows(expected, result, 1e-10, "rank #{rank} of #{size}, #{name}") }
      end
    end
  end

  # A rank without any batch, buffers, evaluation and accumulation in between.
  def test_whatever_the_others_do
    results = world(3) do |rank|
      Torch.manual_seed(1)
      net = Normed.new
      net.double
      model = DDP.new(net)
      sums = []
      value = model.join do
        (rank * 2).times do |step|
          net.zero_grad
          model.eval
          Torch.no_grad { model.call(Torch.ones(2, 3, dtype: :float64)) }
          model.train
          input = Torch.randn(4, 3, dtype: :float64)
          model.no_sync { model.call(input).pow(2).sum.backward } if step.odd?
          model.call(input).pow(2).sum.backward
          sums << net.parameters.first.grad.abs.sum.item
        end
        :done
      end
      [value, net.state_dict.transform_values(&:to_a), sums.size, model.joining?]
    end
    assert_equal 1, results.map { |result| result[1] }.uniq.size, "all have the last one's model, buffers included"
    assert_equal [[:done, 0, false], [:done, 2, false], [:done, 4, false]], results.map { |value, _, count, joining| [value, count, joining] }
  end

  def test_training_goes_on_afterwards
    results = world(2) do |rank|
      net = Torch::NN::Linear.new(1, 1, bias: false)
      model = DDP.new(net)
      run = lambda do
        net.zero_grad
        model.call(Torch.tensor([[rank + 1.0]])).sum.backward
        net.parameters.first.grad.sum.item
      end
      first = model.join(divide_by_initial_world_size: false) { (rank + 1).times.map { run.call } }
      second = model.join { (2 - rank).times.map { run.call } }
      [first, second, run.call, model.join(enable: false) { run.call }]
    end
    assert_equal [[[1.5], [1.5, 0.5], 1.5, 1.5], [[1.5, 2.0], [1.5], 1.5, 1.5]], results
  end

  # Before it and, in a forward that all ranks have, within it; a rank that is through cannot follow.
  def test_parameters_that_are_thawed
    results = world(2) do |rank|
      nets = Array.new(2) { Torch::NN::Linear.new(1, 1, bias: false) }
      model = DDP.new(Torch::NN::Sequential.new(*nets))
      Torch.no_grad { nets.each { |net| net.weight.fill!(1) } }
      run = lambda do |thawed|
        nets[1].weight.requires_grad!(thawed)
        nets.each(&:zero_grad)
        model.call(Torch.tensor([[rank + 1.0]])).sum.backward
        nets.map { |net| net.weight.grad&.sum&.item }
      end
      nets[1].weight.requires_grad!(false)
      before = model.join { (rank + 1).times.map { run.call(false) } }
      within = model.join { [run.call(false), run.call(true), *Array.new(rank) { run.call(true) }] }
      [before, within, failure { model.join { (rank + 1).times { |step| run.call(step.zero?) } } }]
    end
    assert_equal [[[1.5, nil]], [[1.5, nil], [1.5, 1.5]]], results[0].first(2)
    assert_equal [[[1.5, nil], [1.0, nil]], [[1.5, nil], [1.5, 1.5], [1.0, 1.0]]], results[1].first(2)
    results.each { |*, said| assert_match(/ArgumentError .*frozen, thawed or replaced on rank 1, and not on all ranks, within join/, said.join(" ")) }
  end

  HOOKS = {
    of_the_library: :fp16_compress,
    in_ruby: ->(_, bucket) { Distributed.all_reduce(bucket.buffer, op: :avg, async_op: true) }
  }.freeze

  HOOKS.each do |name, hook|
    define_method(:"test_with_a_hook_#{name}") do
      results = world(2) do |rank|
        net = Torch::NN::Linear.new(1, 1, bias: false)
        model = DDP.new(net)
        model.register_comm_hook(nil, hook)
        model.join do
          (rank + 1).times.map do
            net.zero_grad
            model.call(Torch.tensor([[rank + 1.0]])).sum.backward
            net.parameters.first.grad.sum.item
          end
        end
      end
      assert_equal [[1.5], [1.5, 1.0]], results
    end
  end

  def test_with_another_joinable
    results = world(2) do |rank|
      net = Torch::NN::Linear.new(1, 1, bias: false)
      other = Torch::NN::Linear.new(1, 1, bias: false)
      models = [DDP.new(net), DDP.new(other)]
      Torch::Distributed::Algorithms::Join.run(models) do
        (2 - rank).times.map do
          [net, other].each(&:zero_grad)
          models.each { |model| model.call(Torch.tensor([[rank + 1.0]])).sum.backward }
          [net, other].map { |each| each.parameters.first.grad.sum.item }
        end
      end
    end
    assert_equal [[[1.5, 1.5], [0.5, 0.5]], [[1.5, 1.5]]], results
  end

  # A model and its optimizer, whose state and updates are divided among the ranks: those without inputs go on updating their
  # part, with the others' learning rate.
  OPTIMIZERS = {SGD: {lr: 0.1, momentum: 0.9}, Adam: {lr: 0.05}}.freeze

  def trained_with_zero(size, rank, options, views, lr: nil)
    Torch.manual_seed(2)
    net = Odd.new.tap(&:double)
    model = DDP.new(net, **options)
    name, defaults = OPTIMIZERS.to_a[size % 2]
    optimizer = Distributed::Optim::ZeroRedundancyOptimizer.new(net.parameters, optimizer_class: Torch::Optim.const_get(name),
      parameters_as_bucket_view: views, **defaults)
    Distributed::Algorithms::Join.run([model, optimizer]) do
      (2 + 2 * rank).times do |step|
        optimizer.zero_grad
        optimizer.param_groups[0][:lr] = 0.1 / (step + 1) # as a scheduler does
        model.call(Torch.full([2, 7], step + rank + 1, dtype: :float64)).pow(2).mean.backward
        optimizer.step
      end
    end
    [numbers(net), model.joining?, optimizer.joining?]
  end

  def trained_with_all(size)
    Torch.manual_seed(2)
    net = Odd.new.tap(&:double)
    name, defaults = OPTIMIZERS.to_a[size % 2]
    optimizer = Torch::Optim.const_get(name).new(net.parameters, **defaults)
    (2 * size).times do |step|
      optimizer.zero_grad
      optimizer.param_groups[0][:lr] = 0.1 / (step + 1)
      (0...size).select { |rank| step < 2 + 2 * rank }
        .each { |rank| (net.call(Torch.full([2, 7], step + rank + 1, dtype: :float64)).pow(2).mean / size).backward }
      optimizer.step
    end
    numbers(net)
  end

  [[2, {}, false], [3, {gradient_as_bucket_view: false}, true], [4, {find_unused_parameters: true}, true]].each do |size, options, views|
    define_method(:"test_with_an_optimizer_that_is_divided_among_#{size}") do
      expected = Distributed.fork_world(1) { trained_with_all(size) }.first
      world(size) { |rank| trained_with_zero(size, rank, options, views) }.each do |found, *joining|
        assert_follows expected, found, 1e-10
        assert_equal [false, false], joining
      end
    end
  end

  # Ranges of the rank that is through would stay as they are.
  def test_an_optimizer_without_its_model
    results = world(2) do |rank|
      net = Torch::NN::Linear.new(1, 2, bias: false)
      optimizer = Distributed::Optim::ZeroRedundancyOptimizer.new(net.parameters, optimizer_class: Torch::Optim::SGD, lr: 1.0)
      failure do
        Distributed::Algorithms::Join.run([optimizer]) do
          rank.times do
            net.call(Torch.ones(1, 1)).sum.backward
            optimizer.step
          end
        end
      end
    end
    results.each { |name, text| assert_match(/ArgumentError step: rank 0 has no inputs left, and not all gradients.*DistributedDataParallel/, "#{name} #{text}") }
  end

  def test_throw_on_early_termination
    results = world(2) do |rank|
      model = DDP.new(Odd.new)
      failure { model.join(throw_on_early_termination: true) { (rank + 1).times { model.call(Torch.ones(1, 7)).sum.backward } } }
    end
    results.each { |name, text| assert_match(/Torch::Distributed::Error: .*1 of 2 processes have no more inputs/, "#{name}: #{text}") }
  end
end
