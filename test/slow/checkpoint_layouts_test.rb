# frozen_string_literal: true

require_relative "../ruby/divided_models"

# What test/ruby/checkpoint_layouts_test.rb has, for all pairs of more forms.
class AllCheckpointLayoutsTest < Minitest::Test
  include DividedModels

  FORMS = DividedModels.forms("plain" => {}, "tp2" => {tp: 2}, "tp4" => {tp: 4}, "fsdp3" => {fsdp: 3}, "fsdp2_tp2" => {fsdp: 2, tp: 2},
    "fsdp2_dp2" => {fsdp: 2, dp: 2}, "dp2_tp2" => {dp: 2, tp: 2}, "zero2_tp2" => {zero: 2, tp: 2}, "pp2" => {pp: 2}, "pp2_tp2" => {pp: 2, tp: 2},
    "pp2_fsdp2" => {pp: 2, fsdp: 2}, "pp2_zero2" => {pp: 2, zero: 2})

  def test_any_form_goes_on_from_any_other
    Dir.mktmpdir do |dir|
      assert_equal [], world(4) { faults_of(dir, FORMS, FORMS.product(FORMS)) }.flatten
    end
  end

  class One < Torch::NN::Module
    def initialize(shape)
      super()
      @weight = Torch::NN::Parameter.new(Torch.arange(shape.inject(:*)).float.view(*shape))
    end
  end

  # Dimensions, blocks and numbers of ranks at random, before and after.
  def test_random_layouts
    trials = Integer(ENV.fetch("TDDP_RANDOM_CASES", "60"))
    Dir.mktmpdir do |dir|
      wrong = world(4) do |rank|
        random = Random.new(Integer(ENV.fetch("TDDP_RANDOM_SEED", "7")))
        forms = DividedModels.forms("tp2" => {tp: 2}, "tp4" => {tp: 4}, "fsdp2_tp2" => {fsdp: 2, tp: 2}, "fsdp3" => {fsdp: 3}, "plain" => {})
        groups = forms.map { |form| [Distributed.new_group((0...form.size).to_a), groups_of(form, (0...form.size).to_a)] }
        Array.new(trials) do |trial|
          shape = [[24], [12, 24], [24, 6], [2, 12, 12], [8, 3, 24]].sample(random: random)
          sides = Array.new(2) do
            all, along = groups.sample(random: random)
            [all, along, division_of(shape, along[:tp]&.size || 1, random)]
          end
          folder = File.join(dir, trial.to_s)
          one, other = sides.map do |all, along, division|
            [all, divided(One.new(shape), along, division)] if all.is_a?(Distributed::ProcessGroup)
          end
          Checkpoint.save({"model" => one[1]}, checkpoint_id: folder, process_group: one[0]) if one
          Distributed.barrier
          next unless other

          before = other[1].weight.detach.clone
          Torch.no_grad { other[1].weight.fill!(-1) }
          Checkpoint.load({"model" => other[1]}, checkpoint_id: folder, process_group: other[0])
          [rank, shape, sides.map(&:last)] unless before.equal(other[1].weight.detach)
        end.compact
      end
      assert_equal [], wrong.flatten(1)
    end
  end

  # @return [Hash] of a layout of this shape
  def division_of(shape, size, random)
    found = Array.new(50) { {dim: random.rand(shape.size), blocks: random.rand(1..4)} }
    found.find { |each| (shape[each[:dim]] % (each[:blocks] * size)).zero? }
  end

  def divided(model, along, division)
    Distributed::Tensor.divide(model.weight, Layout.new(along[:tp], model.weight.shape, **division)) if along[:tp]
    FSDP.shard(model, groups: [along[:fsdp], nil]) if along[:fsdp]
    model
  end
end
