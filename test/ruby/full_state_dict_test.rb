# frozen_string_literal: true

require_relative "divided_models"

# Whole states of models and optimizers that ranks divide.
class FullStateDictTest < Minitest::Test
  include DividedModels

  Safetensors = Torch::Distributed::Checkpoint::Safetensors
  FORMS = DividedModels.forms("plain" => {}, "tp2" => {tp: 2}, "fsdp2_tp2" => {fsdp: 2, tp: 2}, "dp2_tp2" => {dp: 2, tp: 2}, "fsdp3" => {fsdp: 3},
    "pp2_tp2" => {pp: 2, tp: 2})

  # Names of entries that are not the same.
  def differing(state, expected)
    return ["names: #{state.keys}"] unless state.keys.sort == expected.keys.sort

    expected.reject { |name, tensor| tensor.detach.equal(state[name]) }.keys
  end

  def plain
    @plain ||= DividedModels::Run.new(nil, nil, {}).tap { |run| 2.times { |number| run.step(number) } }
  end

  def stepped(make, seed = 1)
    make.call(seed)&.tap { |run| 2.times { |number| run.step(number) } }
  end

  def test_a_models_state
    faults = world(4) do |rank|
      runs(FORMS).flat_map do |name, make|
        run = stepped(make) or next []
        whole = plain.model.state_dict.merge("norm.running_mean" => Torch.full([6], run.groups[:pp] ? 2 : rank).float)
        pp = run.groups[:pp]
        own = pp ? run.model.state_dict.keys : whole.keys
        state = Distributed.full_state_dict(run.model)
        all = Distributed.full_state_dict(run.model, process_group: pp)
        first = Distributed.full_state_dict(run.model, rank0_only: true, process_group: pp)
        wrong = differing(state, whole.slice(*own).merge("norm.running_mean" => Torch.full([6], rank).float).slice(*own))
        wrong += differing(all.except("norm.running_mean"), whole.except("norm.running_mean"))
        wrong += rank.zero? ? differing(first, whole) : first.keys
        other = make.call(5)
        Distributed.load_full_state_dict(other.model, whole)
        wrong += other.differing(plain.parameters.transform_values(&:detach))
        error = failure { Distributed.load_full_state_dict(other.model, whole.merge("qkv.weight" => Torch.zeros(6, 24))) }&.last
        wrong << error unless error == 'state: "qkv.weight" has the shape [6, 24], expected [24, 6]' || !own.include?("qkv.weight")
        wrong.map { |each| "#{name} on #{rank}: #{each}" }
      end
    end
    assert_equal [], faults.flatten
  end

  def test_an_optimizers_state
    plain_value = ->(value) { value.is_a?(Torch::Tensor) ? value.to_a : value }
    numbers = ->(state) { state["state"].transform_values { |kept| kept.transform_values(&plain_value) } }
    faults = world(4) do |rank|
      expected = plain.optimizer.state_dict
      runs(FORMS).flat_map do |name, make|
        run = stepped(make)
        next [] if run.nil? || name == "plain"
        next failure { FSDP.full_optim_state_dict(run.model, run.optimizer) }.last[/has a part of a model's names/] ? [] : [name] if run.groups[:pp]

        first, all = [true, false].map { |rank0_only| FSDP.full_optim_state_dict(run.model, run.optimizer, rank0_only: rank0_only) }
        wrong = []
        wrong << "all" unless numbers[all] == numbers[expected]
        wrong << "first" unless rank.zero? ? numbers[first] == numbers[expected] : first.empty?
        other = make.call(5)
        Distributed.load_full_state_dict(other.model, plain.model.state_dict)
        FSDP.load_full_optim_state_dict(other.model, other.optimizer, expected)
        [run, other].each { |each| each.step(2) }
        same = run.parameters.all? { |key, tensor| tensor.detach.equal(other.parameters[key].detach) }
        [*wrong, *("a step" unless same)].map { |each| "#{name} on #{rank}: #{each}" }
      end
    end
    assert_equal [], faults.flatten
  end

  def test_states_that_differ_between_ranks_of_a_layout
    said = world(2) do |rank|
      run = runs(DividedModels.forms("tp2" => {tp: 2}))["tp2"].call(1)
      (rank + 1).times { |number| run.step(number) }
      failure { FSDP.full_optim_state_dict(run.model, run.optimizer) }
    end
    assert_equal ["Torch::Distributed::MismatchError"], said.map { |error| error&.first }.uniq
    assert_match(/embed.weight has step: .*1.* on global rank 0, but step: .*2.* on global rank 1/, said[0].last)
  end

  def test_safetensors
    Dir.mktmpdir do |dir|
      faults = world(4) do |rank|
        runs(FORMS).flat_map do |name, make|
          run = stepped(make) or next []
          folder = File.join(dir, name)
          error = failure { Safetensors.save_model(run.model, folder, process_group: run.group) }
          next error.last[/has a part of a model's names/] ? [] : [error] if run.groups[:pp]

          other = make.call(5)
          Safetensors.load_into(other.model, folder, process_group: run.group)
          other.differing(plain.parameters.transform_values(&:detach)).map { |each| "#{name} on #{rank}: #{each}" }
        end
      end
      assert_equal [], faults.flatten
      assert_equal [], differing(Safetensors.load(File.join(dir, "fsdp2_tp2")), Safetensors.load(File.join(dir, "plain")))
    end
  end
end
