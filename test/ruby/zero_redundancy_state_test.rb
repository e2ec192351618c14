# frozen_string_literal: true

require_relative "zero_redundancy"

# The state of ZeroRedundancyOptimizer as a whole, and what it refuses.
class ZeroRedundancyStateTest < Minitest::Test
  include ZeroRedundancy

  def train(optimizer, params, steps)
    steps.each do |step|
      write_gradients(params, step)
      optimizer.step
    end
  end

  # A copy that leaves its process.
  def plain_data(state)
    case state
    when Torch::Tensor then [state.dtype, state.shape, state.to_a]
    when Hash then state.transform_values { |value| plain_data(value) }
    when Array then state.map { |value| plain_data(value) }
    else state
    end
  end

  def assert_same_state(expected, got, message)
    if [expected, got].all? { |each| each.is_a?(Array) && each[2].is_a?(Array) }
      assert_equal expected.first(2), got.first(2), message
      return assert_near([expected[2].flatten], [got[2].flatten], 1e-6, message)
    end
    return assert_equal(expected, got, message) unless expected.is_a?(Hash)

    assert_equal expected.keys, got.keys, message
    expected.each { |key, value| assert_same_state(value, got[key], message) }
  end

  # As they come from AdamW: tensors of parameters' shapes, those of dimension 0 among them, and counts.
  def test_the_gathered_state_is_that_of_the_plain_optimizer
    (1..4).each do |size|
      last = size - 1
      results = world(size) do |rank|
        OPTIMIZERS.to_h do |name, (kind, options)|
          states = [kind, ZeRO].map do |each|
            params = parameters
            groups = [{params: params.first(3), lr: 0.02}, {params: params.drop(3)}]
            optimizer = (each == ZeRO) ? ZeRO.new(groups, optimizer_class: kind, **options) : kind.new(groups, **options)
            train(optimizer, params, 0...3)
            assert_nil optimizer.consolidate_state_dict(to: last) if each == ZeRO
            plain_data(optimizer.state_dict) if each != ZeRO || rank == last
          end
          [name, states]
        end
      end
      results.last.each do |name, (plain, divided)|
        assert_same_state plain, divided, "#{name} on #{size} ranks"
        refute_empty plain["state"] unless name == :fused_sgd
      end
    end
  end

  # Through states of the plain optimizer, and of other numbers of ranks.
  def test_training_goes_on_with_any_number_of_ranks
    %i[sgd adam adagrad asgd fused_adamw].each do |name|
      kind, options = OPTIMIZERS.fetch(name)
      straight = parameters(:float64)
      train(kind.new(straight, **options), straight, 0...8)
      saved = [nil, parameters(:float64).map(&:to_a)]
      [3, nil, 4, 2].each_with_index do |size, part|
        saved = world(size || 1) do
          params = parameters(:float64)
          Torch.no_grad { params.zip(saved[1]) { |param, list| param.copy!(Torch.tensor(list, dtype: :float64).reshape(param.shape)) } }
          optimizer = size ? ZeRO.new(params, optimizer_class: kind, **options) : kind.new(params, **options)
          if saved[0]
            optimizer.param_groups[0][:lr] = 77.0
            optimizer.load_state_dict(restored(saved[0]))
          end
          train(optimizer, params, (2 * part)...(2 * part + 2))
          optimizer.consolidate_state_dict if size
          [(plain_data(optimizer.state_dict) if Distributed.get_rank.zero?), params.map(&:to_a)]
        end.first
      end
      assert_near values(straight), saved[1].map { |list| [list].flatten }, 1e-12, name
    end
  end

  def restored(data)
    case data
    in [Symbol => dtype, Array => shape, list] then Torch.tensor(list, dtype: dtype).reshape(shape)
    in Hash then data.transform_values { |value| restored(value) }
    in Array then data.map { |value| restored(value) }
    else data
    end
  end

  # A state that is loaded does not depend on what was there.
  def test_a_state_replaces_another
    results = world(2) do
      params = parameters
      optimizer = ZeRO.new(params, optimizer_class: Torch::Optim::Adam, lr: 0.1)
      train(optimizer, params, 0...1)
      optimizer.consolidate_state_dict
      kept = Distributed.broadcast_object_list([plain_data(Distributed.get_rank.zero? ? optimizer.state_dict : nil)], src: 0).first
      start = params.map { |param| param.detach.clone }
      memory = state(optimizer.optim).values.map { |each| each[:exp_avg].object_id }
      ends = Array.new(2) do
        train(optimizer, params, 1...4)
        reached = values(params)
        Torch.no_grad { params.zip(start) { |param, before| param.copy!(before) } }
        optimizer.load_state_dict(restored(kept))
        [reached, optimizer.optim.param_groups[0].except(:params), state(optimizer.optim).values.map { |each| each[:exp_avg].object_id } == memory]
      end
      optimizer.load_state_dict({"state" => {}, "param_groups" => restored(kept)["param_groups"]})
      [ends, state(optimizer.optim).size]
    end
    results.each do |(first, second), size|
      assert_equal first, second
      assert_equal [0.1, true, 0], [first[1][:lr], first[2], size]
    end
  end

  # The plain optimizer's state lists it twice as well.
  def test_states_of_tied_parameters
    results = world(2) do
      first, second = parameters.first(2)
      list = [first, second, first]
      optimizer = ZeRO.new(list, optimizer_class: Torch::Optim::Adam)
      write_gradients([first, second], 0)
      optimizer.step
      optimizer.consolidate_state_dict
      plain = Torch::Optim::Adam.new(list)
      plain.load_state_dict(optimizer.state_dict) if Distributed.get_rank.zero?
      optimizer.load_state_dict(Torch::Optim::Adam.new(list).state_dict)
      plain.state_dict["param_groups"][0]["params"] + plain.state_dict["state"].keys
    end
    assert_equal [0, 1, 0, 0, 1], results[0]
  end

  def test_a_checkpoint_keeps_it
    Dir.mktmpdir do |folder|
      ends = [2, 3].map do |size|
        world(size) do |rank|
          params = parameters
          optimizer = ZeRO.new(params, optimizer_class: Torch::Optim::Adam, lr: 0.1)
          loaded = Distributed::Checkpoint.load(folder, optimizer: optimizer, required: false)
          train(optimizer, params, 0...2)
          optimizer.consolidate_state_dict
          Distributed::Checkpoint.save(folder, optimizer: rank.zero? ? optimizer : {})
          [loaded.nil?, (optimizer.state_dict["state"][0]["step"] if rank.zero?)]
        end.first
      end
      assert_equal [[true, 2], [false, 4]], ends
    end
  end

  def test_where_and_when_there_is_a_state
    results = world(2) do
      params = parameters
      optimizer = ZeRO.new(params, optimizer_class: Torch::Optim::Adam)
      before = failure { optimizer.state_dict }
      optimizer.consolidate_state_dict(to: 1)
      gathered = failure { optimizer.state_dict }
      optimizer.step
      [before, gathered, failure { optimizer.state_dict }, failure { optimizer.consolidate_state_dict(to: 2) }]
    end
    missing = ["Torch::Distributed::Error", "state_dict: the state is divided between 2 ranks, and was not gathered since the last step: call " \
      "consolidate_state_dict on all ranks first, and then state_dict on the rank that it names"]
    results.each do |before, _, after, wrong|
      assert_equal [missing, missing], [before, after]
      assert_equal ["ArgumentError", "to: expected a rank within the group, from 0 to 1, got 2"], wrong
    end
    assert_equal "Torch::Distributed::Error", results[0][1][0]
    assert_match(/gathered on rank 1 of the group, not on rank 0: call state_dict there, or consolidate_state_dict\(to: 0\)/, results[0][1][1])
    assert_nil results[1][1]
  end

  # Gradients that are not the same on all ranks.
  def test_ranks_that_made_different_steps
    results = world(2) do |rank|
      params = parameters.first(1)
      optimizer = ZeRO.new(params, optimizer_class: Torch::Optim::Adam)
      write_gradients(params, 0) if rank.zero?
      optimizer.step
      failure { optimizer.consolidate_state_dict }
    end
    assert_equal 1, results.uniq.size
    assert_equal "Torch::Distributed::MismatchError", results[0][0]
    assert_match(/state of parameter 0 on all ranks, but global rank 0 has step: 1, .*, global rank 1 has none/, results[0][1])
  end

  # Its state is neither a value nor one value for each element.
  class Odd < Torch::Optim::SGD
    def step(closure = nil)
      super
      @param_groups[0][:params].each { |param| @state[param][:odd] = Torch.zeros(3, 4) }
    end
  end

  def test_states_that_cannot_be_divided
    results = world(2) do |rank|
      params = parameters.first(1)
      optimizer = ZeRO.new(params, optimizer_class: Odd, lr: 0.1)
      optimizer.step
      failure { optimizer.consolidate_state_dict }
    end
    assert_equal [["ArgumentError", "consolidate_state_dict: the state on global rank 0 cannot be gathered: expected odd with a value for each of " \
      "43 elements, or with one value, got shape [3, 4]"]] * 2, results
  end

  def test_states_that_do_not_fit
    results = world(2) do
      params = parameters
      optimizer = ZeRO.new(params, optimizer_class: Torch::Optim::Adam)
      plain = Torch::Optim::Adam.new(parameters)
      train(plain, plain.param_groups[0][:params], 0...1)
      train(optimizer, params, 0...1)
      good = plain.state_dict
      changed = ->(&block) { restored(plain_data(good)).tap(&block) }
      states = [nil, {"state" => {}, "param_groups" => []}, changed.call { |bad| bad["state"][3]["exp_avg"] = Torch.zeros(4) },
        changed.call { |bad| bad["state"][2].delete("exp_avg_sq") }, changed.call { |bad| bad["state"][9] = {} }]
      before = plain_data(state(optimizer.optim).values)
      failures = states.map { |bad| failure { optimizer.load_state_dict(bad) } }
      [failures, before == plain_data(state(optimizer.optim).values)]
    end
    results.each do |failures, untouched|
      assert untouched
      assert_equal ["ArgumentError"], failures.map(&:first).uniq
      [/expected a Hash with "state" and "param_groups"/, /expected 1 parameter group, as this .*ZeroRedundancyOptimizer has, got 0/,
        /expected exp_avg of parameter 3 in its shape \[3, 7, 2\], got \[4\]/,
        /state of parameter 2 lacks exp_avg_sq: expected what a Torch::Optim::Adam saved/,
        /there is state of \[9\]/].zip(failures) { |text, (_, message)| assert_match text, message }
    end
  end

  def test_arguments
    alone do
      param = Torch::NN::Parameter.new(Torch.zeros(2))
      {
        [nil] => /params: expected an Array of parameters or of groups .* got nil \(NilClass\)/,
        [[]] => /params: expected .* got an empty one/,
        [[param, 3]] => /params\[1\]: expected a Torch::Tensor, got 3 \(Integer\)/,
        [[param * 2]] => /params\[0\]: expected a parameter, got the result of an operation/,
        [[{params: [param]}, {lr: 3}]] => /params\[1\]: expected a Hash with an Array of parameters as :params/,
        [[{params: [param]}, {params: [param]}]] => /params\[1\]\[:params\]\[0\]: expected a parameter of one group, got one that is in another/,
        [[Torch::NN::Parameter.new(Torch.zeros(1).expand(3))]] => /params\[0\]: expected a tensor that can be written/
      }.each do |arguments, text|
        assert_match text, failure { ZeRO.new(*arguments, optimizer_class: Torch::Optim::SGD, lr: 0.1) }.last
      end
      [nil, Torch::Optim, Torch::Optim::Optimizer, String, ZeRO, Torch::Optim::SGD.new([param], lr: 1)].each do |kind|
        error = assert_raises(ArgumentError) { ZeRO.new([param], optimizer_class: kind, lr: 0.1) }
        assert_match(/optimizer_class: expected a class of optimizers such as Torch::Optim::Adam, got/, error.message)
      end
      assert_match(/lr/, failure { ZeRO.new([param], optimizer_class: Torch::Optim::SGD) }.last)
      assert_match(/momentun/, failure { ZeRO.new([param], optimizer_class: Torch::Optim::SGD, lr: 1, momentun: 2) }.last)
      assert_match(/process_group: this process is not in the group/,
        failure { ZeRO.new([param], optimizer_class: Torch::Optim::SGD, lr: 1, process_group: Distributed::GroupMember::NON_GROUP_MEMBER) }.last)
      optimizer = ZeRO.new([param], optimizer_class: Torch::Optim::SGD, lr: 0.1)
      assert_match(/param_group\[:params\]\[0\]: expected a parameter of one group/, failure { optimizer.add_param_group({params: [param]}) }.last)
      assert_match(/param_group: expected a Hash/, failure { optimizer.add_param_group([param]) }.last)
      assert_raises(FrozenError) { optimizer.param_groups[0][:params] << param }
      optimizer.param_groups[0][:params] = [param]
      assert_match(/param_groups\[0\]\[:params\]: expected the parameters of the constructor/, failure { optimizer.step }.last)
    end
    assert_match(/init_process_group first/, failure { ZeRO.new(parameters, optimizer_class: Torch::Optim::SGD, lr: 1) }.last)
  end

  def test_ranks_that_differ
    results = world(3) do |rank|
      odd = rank == 2
      make = ->(params, **options) { failure { ZeRO.new(params, optimizer_class: Torch::Optim::SGD, lr: 0.1, **options) } }
      optimizer = ZeRO.new(parameters, optimizer_class: Torch::Optim::SGD, lr: 0.1)
      [make.call(parameters.first(odd ? 2 : 3)),
        make.call(parameters(odd ? :float64 : :float32)),
        make.call([Torch::NN::Parameter.new(Torch.zeros(3, odd ? 4 : 5))]),
        make.call([Torch::NN::Parameter.new(Torch.zeros(3), requires_grad: !odd)]),
        make.call(parameters, momentum: odd ? 0.5 : 0.9),
        make.call(parameters.first(1).then { |list| odd ? list * 2 : list + parameters.first(1) }),
        make.call(parameters, parameters_as_bucket_view: odd),
        failure { optimizer.add_param_group({params: [Torch::NN::Parameter.new(Torch.zeros(odd ? 1 : 2))]}) },
        optimizer.param_groups.size]
    end
    assert_equal 1, results.uniq.size
    failures, groups = results[0].first(8), results[0].last
    assert_equal [["Torch::Distributed::MismatchError"], 1], [failures.map(&:first).uniq, groups]
    start = "expected the same parameters and options on all ranks, but global rank 0 has"
    [
      "#{start} \"parameter 2 of group 0: float32 of shape [] on cpu\" where global rank 2 has \"group 0: lr: 0.1, ",
      "has \"parameter 0 of group 0: float64 of shape [17, 5] on cpu\"",
      "has \"parameter 0 of group 0: float32 of shape [3, 4] on cpu\"",
      "has \"parameter 0 of group 0: float32 of shape [3] on cpu, frozen\"",
      "momentum: 0.5",
      "has \"parameter 1 of group 0: the same as parameter 0\"",
      "has \"parameters_as_bucket_view: true\"",
      "add_param_group: #{start} \"parameter 0 of group 1: float32 of shape [2] on cpu\""
    ].zip(failures) { |text, (_, message)| assert_includes message, text }
  end

  def test_sparse_gradients_are_refused_on_all_ranks
    results = world(2) do
      embedding = Torch::NN::Embedding.new(4, 2, sparse: true)
      params = [*parameters, *embedding.parameters]
      optimizer = ZeRO.new(params, optimizer_class: Torch::Optim::SGD, lr: 0.1)
      embedding.call(Torch.tensor([1, 2])).sum.backward
      failure { optimizer.step }
    end
    assert_equal [["ArgumentError", "step: expected a dense gradient of param_groups[0][:params][6], got one with layout sparse"]] * 2, results
  end

  def test_what_it_shows
    alone do
      optimizer = ZeRO.new(parameters, optimizer_class: Torch::Optim::SGD, lr: 0.1)
      assert_equal "#<Torch::Distributed::Optim::ZeroRedundancyOptimizer Torch::Optim::SGD, rank 0 of 1, 142 of 142 elements>", optimizer.inspect
      assert_kind_of Torch::Optim::Optimizer, optimizer
      assert_instance_of Torch::Optim::SGD, optimizer.optim
    end
  end
end
