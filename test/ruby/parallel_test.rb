# frozen_string_literal: true

require_relative "parallel_training"

# Models that several dimensions divide at once: some combinations; test/slow has all that fit four processes, and more steps.
class ParallelTest < Minitest::Test
  include Worlds

  def test_all_dimensions_at_once_follow_one_process
    differences = Dir.mktmpdir do |dir|
      world(4) do
        expected = ParallelTraining.plain(4, :float64, 0.5)
        [
          [{pp: 2, tp: 2}, {}],
          [{dp: 2, tp: 2}, {shard: :full_shard}],
          [{pp: 2, dp: 2}, {shard: :full_shard, checkpoint_ratio: 0.5}]
        ].each_with_index.map do |(dims, options), i|
          ParallelTraining.difference("#{dir}/#{i}", expected, dims, :float64, 4, 0.5, **options)
        end
      end
    end
    assert_operator differences.flatten.max, :<, 1e-10, differences.inspect
  end

  def test_the_output_is_that_of_the_plain_model
    world(4) do
      parallel, = ParallelTraining.divided({pp: 2, tp: 2}, :float64)
      ids, = ParallelTraining.batch(0)
      expected = Torch.no_grad { ParallelTraining.net(:float64).call(ids) }
      output = Torch::Distributed::NN.gather_from_region(parallel.call(ids), group: parallel.mesh.get_group("tp"))
      raise "differs" unless (output - expected).abs.max.item < 1e-12
    end
  end

  def test_mistakes_name_what_is_wrong
    found = world(2) do
      mesh = Torch::Distributed.init_device_mesh("cpu", [2], mesh_dim_names: ["pp"])
      other = Torch::Distributed.init_device_mesh("cpu", [2], mesh_dim_names: ["rows"])
      stages = [%w[embedding blocks.0 blocks.1], %w[blocks.2 blocks.3 head]]
      [
        {mesh: nil}, {mesh: other}, {mesh: mesh}, {mesh: mesh, stages: stages.first(1)}, {mesh: mesh, stages: [stages[0], ["head"]]},
        {mesh: mesh, stages: [stages[0] + ["head"], stages[1]]}, {mesh: mesh, stages: [stages[0], ["tail"]]}, {mesh: mesh, stages: stages, shard: :half},
        {mesh: mesh, stages: stages, shard: :hybrid_shard}, {mesh: mesh, stages: stages, mixed_precision: :bfloat16}, {mesh: mesh, stages: stages, schedule: :ring},
        {mesh: mesh, stages: stages, microbatches: 0}, {mesh: mesh, stages: stages, checkpoint_ratio: 2}
      ].map do |options|
        Torch::Distributed::Parallel.new(ParallelTraining.net(:float32), loss_fn: Gpt.loss(nil), **options)
        "nothing"
      rescue ArgumentError, TypeError => e
        e.message
      end
    end
    expected = [
      /mesh: expected a DeviceMesh, got nil/, /mesh: expected dimensions among pp, .* got rows/, /stages: expected names .* 2 processes along pp, got nil/,
      /stages: expected a multiple of 2, .* got 1/, /stages: the parameter "blocks\.2\.\S+" is in none/, /stages: "head" is in them twice/, /stages: "tail": expected a module of the Gpt/,
      /shard: expected one of .* got :half/, /shard: hybrid_shard: expected .*dp_replicate/, /mixed_precision: expected a mesh with dp/, /schedule: expected one of .* got :ring/,
      /microbatches: expected 1 or more/, /checkpoint_ratio: expected a number from 0 to 1, got 2/
    ]
    found.each { |texts| expected.zip(texts).each { |pattern, text| assert_match pattern, text } }
  end
end
