# frozen_string_literal: true

require_relative "parallel_models"

# Tensor and sequence parallel training follow one process.
class TensorParallelTest < Minitest::Test
  include ParallelModels

  def language_loss(model, step, divided, mesh)
    ids = tokens(2, 12, 24, seed: step)
    targets = tokens(2, 12, 24, seed: step + 50)
    targets[0, 3] = -100
    logits = model.call(ids)
    return Parallel.cross_entropy(logits, targets, mesh: mesh) if divided

    Torch::NN::F.cross_entropy(logits.view(-1, 24), targets.view(-1))
  end

  def mlp_on(mesh)
    model = Parallel.parallelize_module(make { Mlp.new(6, 24) }, mesh, "up" => ColwiseParallel.new, "down" => RowwiseParallel.new)
    follow(make { Mlp.new(6, 24) }, model) { |each, step| each.call(numbers(5, 6, seed: step)).pow(2).mean }
  end

  def gpt_on(mesh, plan, **options)
    model = Parallel.parallelize_module(make { Gpt.new(**options) }, mesh, plan)
    follow(make { Gpt.new(**options) }, model, steps: 2) { |each, step, divided| language_loss(each, step, divided, mesh) }
  end

  (1..4).each do |size|
    define_method(:"test_models_on_#{size}_ranks") do
      found = world(size) do
        mesh = mesh(size)
        {
          mlp: mlp_on(mesh), fused: gpt_on(mesh, gpt_plan), apart: gpt_on(mesh, gpt_plan(fused: false), fused: false),
          sequence: gpt_on(mesh, sequence_plan), sequence_apart: gpt_on(mesh, sequence_plan(fused: false), fused: false)
        }
      end
      found.each { |all| all.each { |name, differences| assert_operator differences.max, :<, 1e-10, "#{name}: #{differences}" } }
    end
  end
end
