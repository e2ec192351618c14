# frozen_string_literal: true

require_relative "zero_redundancy"

# Steps. Gradients are written by hand, the same on all ranks, but for the tests with DistributedDataParallel.
class ZeroRedundancyOptimizerTest < Minitest::Test
  include ZeroRedundancy

  TOLERANCE = {float32: 1e-6, float64: 1e-12}.freeze

  # Values after some steps, of the plain optimizer and of the divided one.
  def both(kind, options, dtype: :float32, steps: 5, **others)
    plain, divided = parameters(dtype), parameters(dtype)
    optimizers = [kind.new(plain, **options), ZeRO.new(divided, optimizer_class: kind, **others, **options)]
    steps.times do |step|
      [plain, divided].zip(optimizers) do |params, optimizer|
        write_gradients(params, step)
        yield optimizer, params, step if block_given?
        optimizer.step
      end
    end
    [plain, divided].map { |params| values(params) }
  end

  (1..4).each do |size|
    define_method(:"test_steps_are_those_of_the_plain_optimizer_on_#{size}_ranks") do
      results = world(size) do
        OPTIMIZERS.transform_values { |kind, options| TOLERANCE.keys.map { |dtype| both(kind, options, dtype: dtype) } }
      end
      assert_equal 1, results.map { |result| result.transform_values { |dtypes| dtypes.map(&:last) } }.uniq.size, "ranks differ"
      results.first.each do |name, dtypes|
        dtypes.zip(TOLERANCE) do |(plain, divided), (dtype, tolerance)|
          assert_near plain, divided, tolerance, "#{name} #{dtype}"
          refute_equal values(parameters(dtype)), divided, name
        end
      end
    end

    define_method(:"test_each_rank_has_its_share_of_the_state_on_#{size}_ranks") do
      results = world(size) do
        params = parameters
        groups = [{params: params.first(2)}, {params: params.drop(2), lr: 0.1}]
        optimizer = ZeRO.new(groups, optimizer_class: Torch::Optim::Adam)
        write_gradients(params, 0)
        optimizer.step
        optimizer.optim.param_groups.map { |group| group[:params].sum { |param| state(optimizer.optim).fetch(param)[:exp_avg].numel } }
      end
      [SHAPES.first(2), SHAPES.drop(2)].zip(results.transpose) do |shapes, counts|
        elements = shapes.sum { |shape| shape.inject(1, :*) }
        assert_equal [elements.fdiv(size).ceil, elements], [counts.max, counts.sum]
      end
    end

    define_method(:"test_with_data_parallel_on_#{size}_ranks") do
      kind, options = OPTIMIZERS.fetch(:adamw)
      expected = Distributed.fork_world(1) { train(0, 1) { |net| kind.new(net.parameters, **options) } }.first
      results = world(size) do |rank|
        [false, true].map do |views|
          train(rank, size) { |net| ZeRO.new(net.parameters, optimizer_class: kind, parameters_as_bucket_view: views, **options) }
        end
      end
      assert_equal 1, results.flatten(1).uniq.size
      assert_near expected, results.first.first, 1e-10
    end
  end

  # @yieldreturn [Torch::Optim::Optimizer]
  # @return [Array<Array<Float>>] the parameters after training
  def train(rank, size)
    Torch.manual_seed(3)
    net = Torch::NN::Sequential.new(Torch::NN::Linear.new(7, 5), Torch::NN::Tanh.new, Torch::NN::Linear.new(5, 3)).double
    inputs, targets = Torch.randn(4, 12, 7, dtype: :float64), Torch.randn(4, 12, 3, dtype: :float64)
    optimizer = yield net
    model = optimizer.is_a?(ZeRO) ? Torch::NN::Parallel::DistributedDataParallel.new(net) : net
    4.times do |step|
      optimizer.zero_grad
      part = [inputs, targets].map { |all| all[step].narrow(0, rank * 12 / size, 12 / size) }
      Torch::NN::F.mse_loss(model.call(part[0]), part[1]).backward
      optimizer.step
    end
    values(net.parameters)
  end

  def test_fewer_elements_than_ranks
    results = world(4) do
      params = Array.new(2) { |i| Torch::NN::Parameter.new(Torch.tensor([i + 1.0])) }
      optimizer = ZeRO.new([{params: params}, {params: []}], optimizer_class: Torch::Optim::SGD, lr: 0.5, momentum: 0.9, fused: true)
      2.times do
        params.each { |param| param.grad = Torch.ones(1) }
        optimizer.step
      end
      [values(params), optimizer.optim.param_groups.map { |group| group[:params].size }]
    end
    assert_equal [[[-0.45], [0.55]]] * 4, results.map { |all, _| all.map { |list| list.map { |value| value.round(6) } } }
    assert_equal [[1, 0], [1, 0], [0, 0], [0, 0]], results.map(&:last)
  end

  def test_several_dtypes_and_groups_with_options_of_their_own
    results = world(3) do
      [Torch::Optim::RMSprop, ZeRO].map do |kind|
        params = parameters.each_with_index.map { |param, i| i.even? ? param : Torch::NN::Parameter.new(param.detach.double) }
        groups = [{params: params.first(3), lr: 0.1}, {params: params.drop(3), weight_decay: 0.3, momentum: 0.7}]
        optimizer = (kind == ZeRO) ? ZeRO.new(groups, optimizer_class: Torch::Optim::RMSprop, lr: 0.02) : kind.new(groups, lr: 0.02)
        4.times do |step|
          write_gradients(params, step)
          optimizer.step
        end
        [values(params), optimizer.param_groups.map { |group| group.except(:params) }, params.map(&:dtype)]
      end
    end
    assert_equal 1, results.map(&:last).uniq.size
    plain, divided = results.first
    assert_near plain[0], divided[0], 1e-6
    assert_equal plain.drop(1), divided.drop(1)
  end

  # As plain ones do: no step, no state.
  def test_parameters_without_gradients_are_passed_over
    plain, divided = world(3) do
      both(*OPTIMIZERS.fetch(:adamw)) do |_, params, step|
        params.each_with_index { |param, i| param.grad.zero! if step == 2 && i == 3 }
        drop_gradients(params.values_at(0, 2)) if step.even?
        drop_gradients([params[4]])
      end
    end.first
    assert_near plain, divided, 1e-6
    assert_equal values(parameters)[4], divided[4]
    refute_equal values(parameters)[0], divided[0]
  end

  def test_tied_parameters_are_stepped_once
    results = world(2) do
      first, second = parameters.first(2)
      optimizer = ZeRO.new([first, second, first], optimizer_class: Torch::Optim::SGD, lr: 0.5)
      [first, second].each { |param| param.grad = Torch.ones(param.shape) }
      before = values([first, second])
      optimizer.step
      values([first, second]).zip(before).map { |after, earlier| after.zip(earlier).map { |one, other| (one - other).round(4) }.uniq }
    end
    assert_equal [[[-0.5], [-0.5]]] * 2, results
  end

  # Transposed, and moved elsewhere between two steps.
  def test_memory_of_parameters
    results = world(3) do
      transposed = Torch.arange(0, 15, dtype: :float64).reshape(3, 5).t
      params = [Torch::NN::Parameter.new(transposed), *parameters(:float64).first(2)]
      refute_predicate params[0], :contiguous?
      optimizer = ZeRO.new(params, optimizer_class: Torch::Optim::Adam, lr: 0.1)
      copies = params.map { |param| Torch::NN::Parameter.new(param.detach.contiguous) }
      plain = Torch::Optim::Adam.new(copies, lr: 0.1)
      4.times do |step|
        params[1].set_data(params[1].data.clone) if step == 2
        [[optimizer, params], [plain, copies]].each do |each, list|
          write_gradients(list, step)
          each.step
        end
      end
      [values(params), values(copies), params[0].stride]
    end
    assert_equal 1, results.uniq.size
    assert_near results[0][1], results[0][0], 1e-12
    assert_equal [1, 5], results[0][2]
  end

  # Side by side in one memory, to which what gets other memory is moved back.
  def test_parameters_as_bucket_views
    results = world(3) do
      runs = [false, true].map do |views|
        both(Torch::Optim::Adam, {lr: 0.1}, dtype: :float64, parameters_as_bucket_view: views) do |optimizer, params, step|
          params[1].set_data(params[1].data.clone) if step == 2
        end
      end
      params = [Torch::NN::Parameter.new(Torch.arange(0, 15, dtype: :float64).reshape(3, 5).t), *parameters(:float64), *parameters]
      before = values(params)
      ZeRO.new(params, optimizer_class: Torch::Optim::SGD, parameters_as_bucket_view: true, lr: 0.1)
      spans = params.group_by(&:dtype).values.map { |list| list.map { |param| Distributed._span(param) }.reject { |_, bytes| bytes.zero? } }
      gaps = spans.flat_map { |list| list.each_cons(2).map { |(at, bytes), (following, _)| following - at - bytes } }
      [runs, values(params) == before, gaps.uniq, params[0].contiguous?]
    end
    runs, *placed = results[0]
    assert_near(*runs[1], 1e-12)
    assert_equal runs[0], runs[1]
    assert_equal [true, [0], true], placed
    assert_equal [runs], results.map(&:first).uniq
  end

  # One operation for each dtype, instead of one for each parameter or part of one.
  def test_how_often_a_step_gathers
    counts = world(2) do
      [false, true].map do |views|
        params = parameters + parameters(:float64)
        optimizer = ZeRO.new(params, optimizer_class: Torch::Optim::SGD, parameters_as_bucket_view: views, lr: 0.1)
        write_gradients(params, 0)
        before = Distributed.barrier(async_op: true).tap(&:wait).sequence
        optimizer.step
        Distributed.barrier(async_op: true).tap(&:wait).sequence - before - 1
      end
    end
    counts.each do |pieces, views|
      assert_equal 2, views
      assert_operator pieces, :>, 2
    end
  end

  # They would leave less of what trains to some ranks; and they are not gathered.
  def test_frozen_parameters_are_divided_apart
    results = world(2) do |rank|
      params = parameters
      frozen = params.max_by(&:numel)
      frozen.requires_grad = false
      Torch.no_grad { frozen.fill!(rank + 1.0) }
      optimizer = ZeRO.new(params, optimizer_class: Torch::Optim::SGD, lr: 0.1, momentum: 0.9)
      write_gradients(params - [frozen], 0)
      optimizer.step
      kept = [values([frozen]).flatten.uniq, state(optimizer.optim).values.sum { |each| each[:momentum_buffer].numel }]
      frozen.requires_grad = true
      write_gradients(params, 1)
      optimizer.step
      [*kept, values(params)]
    end
    sizes = SHAPES.map { |shape| shape.inject(1, :*) }
    trained = sizes.sum - sizes.max
    assert_equal [[[1.0], [2.0]], [trained.fdiv(2).ceil, trained / 2]], results.map { |result| result.first(2) }.transpose
    assert_equal results[0].last, results[1].last
  end

  def test_schedulers_and_programs_change_options
    results = world(2) do
      [true, false].map do |divided|
        params = parameters
        options = {lr: 0.1, momentum: 0.5}
        optimizer = divided ? ZeRO.new(params, optimizer_class: Torch::Optim::SGD, **options) : Torch::Optim::SGD.new(params, **options)
        scheduler = Torch::Optim::LRScheduler::StepLR.new(optimizer, step_size: 2, gamma: 0.1)
        rates = Array.new(6) do |step|
          optimizer.param_groups[0][:momentum] = 0.9 if step == 3
          write_gradients(params, step)
          optimizer.step
          scheduler.step
          optimizer.param_groups[0][:lr]
        end
        [values(params), rates, optimizer.param_groups[0].except(:params)]
      end
    end
    divided, plain = results[0]
    assert_near plain[0], divided[0], 1e-6
    assert_equal plain.drop(1), divided.drop(1)
    assert_equal results[0], results[1]
  end

  # An optimizer that counts in its options.
  class Counting < Torch::Optim::SGD
    def step(closure = nil)
      @param_groups.each { |group| group[:count] = group.fetch(:count, 0) + 1 }
      super
    end
  end

  def test_what_the_optimizer_changes_is_seen
    alone do
      optimizer = ZeRO.new(parameters, optimizer_class: Counting, lr: 0.1)
      2.times { optimizer.step }
      assert_equal 2, optimizer.param_groups[0][:count]
      optimizer.param_groups[0][:count] = 7
      optimizer.step
      assert_equal 8, optimizer.param_groups[0][:count]
    end
  end

  def test_groups_can_be_added
    results = world(3) do
      [true, false].map do |divided|
        params = parameters
        kind = Torch::Optim::Adam
        optimizer = divided ? ZeRO.new(params.first(2), optimizer_class: kind, lr: 0.1) : kind.new(params.first(2), lr: 0.1)
        4.times do |step|
          optimizer.add_param_group({params: params.drop(2), lr: 0.5}) if step == 2
          write_gradients(params, step)
          optimizer.step
        end
        counts = optimizer.optim.param_groups.map { |group| group[:params].sum(&:numel) } if divided
        [values(params), optimizer.param_groups.map { |group| group.except(:params) }, counts]
      end
    end
    divided, plain = results[0]
    assert_near plain[0], divided[0], 1e-6
    assert_equal plain[1], divided[1]
    elements = SHAPES.drop(2).sum { |shape| shape.inject(1, :*) }
    assert_equal elements.fdiv(3).ceil, divided[2][1]
    assert_equal elements, results.sum { |result| result[0][2][1] }
  end

  def test_closures_return_the_loss
    alone do
      params = parameters
      optimizer = ZeRO.new(params, optimizer_class: Torch::Optim::SGD, lr: 0.1)
      before = values(params)
      assert_equal :loss, optimizer.step(-> { write_gradients(params, 0) && :loss })
      refute_equal before, values(params)
      assert_equal :other, optimizer.step { :other }
      assert_nil optimizer.step
      assert_match(/closure or a block, got both/, failure { optimizer.step(-> {}) {} }.last)
    end
  end

  # Nor are gradients kept alive.
  def test_gradients_are_forgotten_or_zeroed
    alone do
      params = parameters
      [[{}, false], [{fused: true}, true], [{fused: true, set_to_none: false}, false], [{set_to_none: true}, true]].each do |options, forgotten|
        optimizer = ZeRO.new(params, optimizer_class: Torch::Optim::SGD, lr: 0.1, **options.slice(:fused))
        write_gradients(params, 0)
        optimizer.step
        assert_equal [nil], optimizer.optim.param_groups[0][:params].map(&:grad).uniq
        optimizer.zero_grad(**options.slice(:set_to_none))
        assert_equal forgotten ? [nil] : [0.0], params.flat_map { |param| param.grad&.to_a || [nil] }.flatten.uniq
      end
    end
  end

  # Two groups of two ranks, whose models differ.
  def test_within_a_group
    results = world(4) do |rank|
      groups = [[0, 2], [1, 3]].map { |ranks| Distributed.new_group(ranks) }
      params = [Torch::NN::Parameter.new(Torch.zeros(3 + rank % 2))]
      optimizer = ZeRO.new(params, optimizer_class: Torch::Optim::SGD, process_group: groups[rank % 2], lr: 1.0, momentum: 0.9)
      params[0].grad = Torch.ones(params[0].shape) * (1 + rank % 2)
      optimizer.step
      optimizer.consolidate_state_dict(to: 1)
      [values(params), optimizer.process_group.equal?(groups[rank % 2]), (optimizer.state_dict["state"][0]["momentum_buffer"].to_a if rank > 1)]
    end
    assert_equal [[[[-1.0] * 3], true, nil], [[[-2.0] * 4], true, nil], [[[-1.0] * 3], true, [1.0] * 3], [[[-2.0] * 4], true, [2.0] * 4]], results
  end
end
