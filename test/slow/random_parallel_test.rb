# frozen_string_literal: true

require_relative "../ruby/parallel_models"

# Transformers of random sizes, divided in random ways, beside the same on one process.
class RandomParallelTest < Minitest::Test
  include ParallelModels

  CASES = Integer(ENV.fetch("TDDP_RANDOM_CASES", "40"))
  SEED = Integer(ENV.fetch("TDDP_RANDOM_SEED", "1000"))

  Case = Struct.new(:model, :heads, :batch, :sequence, :checkpointed, keyword_init: true)

  def generate(seed, size)
    random = Random.new(seed)
    heads, head_size = size * random.rand(1..3), random.rand(1..4)
    model = {
      vocabulary: size * random.rand(2..9), width: heads * head_size, head_size: head_size, length: size * random.rand(1..4),
      depth: random.rand(1..3), fused: random.rand < 0.5
    }
    Case.new(model: model, heads: heads, batch: random.rand(1..3), sequence: random.rand < 0.5, checkpointed: random.rand < 0.3)
  end

  def plan(of)
    fused = of.model[:fused]
    of.sequence ? sequence_plan(fused: fused) : gpt_plan(fused: fused, heads: of.heads)
  end

  def differences(of, mesh)
    plain, model = Array.new(2) { make { Gpt.new(**of.model) } }
    model.checkpointed = of.checkpointed
    Parallel.parallelize_module(model, mesh, plan(of))
    vocabulary, length = of.model.values_at(:vocabulary, :length)
    follow(plain, model) do |each, step, divided|
      ids, targets = [step, step + 50].map { |seed| tokens(of.batch, length, vocabulary, seed: seed) }
      logits = each.call(ids)
      divided ? Parallel.cross_entropy(logits, targets, mesh: mesh) : Torch::NN::F.cross_entropy(logits.view(-1, vocabulary), targets.view(-1))
    end
  end

  [2, 3, 4].each do |size|
    define_method(:"test_transformers_on_#{size}_ranks_are_those_of_one_process") do
      cases = Array.new(CASES) { |i| generate(SEED + i, size) }
      found = world(size) { |_| mesh(size).then { |mesh| cases.map { |of| differences(of, mesh) } } }
      found.each { |all| all.zip(cases) { |differences, of| assert_operator differences.max, :<, 1e-9, "#{of}: #{differences}" } }
    end
  end
end
