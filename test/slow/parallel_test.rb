# frozen_string_literal: true

require_relative "../ruby/parallel_training"

# Every combination of dimensions that fits four processes, and two of each on eight, beside one process.
class ParallelCombinationsTest < Minitest::Test
  include Worlds

  STEPS = 20
  SHARDS = [:no_shard, :shard_grad_op, :full_shard].freeze
  TOLERANCE = {float64: 1e-10, float32: 1e-5}.freeze

  # @return [Array<Array(Hash, Hash)>] dimensions and options of all meshes of that many processes
  def self.combinations(size)
    sizes = (1..size).select { |each| (size % each).zero? }
    meshes = sizes.product(sizes, sizes).select { |each| each.inject(:*) == size }
    meshes.flat_map do |pp, dp, tp|
      ways = (dp > 1) ? SHARDS : SHARDS.first(1)
      schedules = (pp > 1) ? [:gpipe, :"1f1b"] : [:"1f1b"]
      ways.product(schedules).map { |shard, schedule| [{pp: pp, dp: dp, tp: tp}, {shard: shard, schedule: schedule}] }
    end
  end

  (1..4).each do |size|
    TOLERANCE.each_key do |dtype|
      define_method(:"test_on_#{size}_processes_in_#{dtype}") { follow(size, self.class.combinations(size), dtype) }
    end
  end

  def test_two_of_each_on_eight
    follow(8, SHARDS.map { |shard| [{pp: 2, dp: 2, tp: 2}, {shard: shard, checkpoint_ratio: 0.5}] }, :float64)
  end

  def test_replicas_of_shards
    dims = {dp_replicate: 2, dp_shard: 2}
    follow(4, [[dims, {shard: :hybrid_shard}]], :float64)
    follow(8, [[dims.merge(tp: 2), {shard: :hybrid_shard}], [{pp: 2}.merge(dims), {shard: :hybrid_shard, microbatches: 3}]], :float64)
  end

  def test_several_stages_for_each_process
    options = {stages: 2, microbatches: 4}
    follow(4, %i[interleaved_1f1b interleaved_zero_bubble].map { |name| [{pp: 2, tp: 2}, options.merge(schedule: name)] }, :float64)
  end

  def test_stages_that_share_a_weight
    differences = Dir.mktmpdir do |dir|
      world(4) do
        expected = ParallelTraining.plain(4, :float64, 0.5, tied: true)
        [{pp: 2, tp: 2}, {pp: 2, dp: 2}].each_with_index.map do |dims, i|
          ParallelTraining.difference("#{dir}/#{i}", expected, dims, :float64, 4, 0.5, tied: true)
        end
      end
    end
    assert_operator differences.flatten.max, :<, 1e-10, differences.inspect
    error = assert_raises(Torch::Distributed::WorkerError) { world(2) { ParallelTraining.divided({pp: 2, dp: 1}, :float64, tied: true, shard: :full_shard, mixed_precision: :bfloat16) } }
    assert_match(/shard: embedding\.bytes\.weight and head\.scores\.weight are one parameter, in different stages/, error.message)
  end

  def test_a_checkpoint_of_each_goes_on_with_each
    all = self.class.combinations(4).select { |_, options| options[:schedule] == :"1f1b" }
    worst = Dir.mktmpdir do |dir|
      world(4) do
        losses, = ParallelTraining.plain(4, :float64, nil)
        all.each_with_index.map do |(dims, options), i|
          model, optimizer = ParallelTraining.divided(dims, :float64, **options)
          actual = ParallelTraining.train(model, optimizer, 0...2, nil)
          Torch::Distributed::Checkpoint.save("#{dir}/#{i}", model: model, optimizer: optimizer, step: 2)
          # Every one is loaded by another one, and each loads another one's.
          dims, options = all[(i + all.size / 2) % all.size]
          model, optimizer = ParallelTraining.divided(dims, :float64, **options)
          Torch::Distributed::Checkpoint.load("#{dir}/#{i}", model: model, optimizer: optimizer)
          actual += ParallelTraining.train(model, optimizer, 2...4, nil)
          losses.zip(actual).map { |one, other| (one - other).abs / one }.max
        end.max
      end
    end.max
    assert_operator worst, :<, 1e-10
  end

  private

  def follow(size, combinations, dtype)
    clip = 0.5
    found = Dir.mktmpdir do |dir|
      world(size) do
        expected = ParallelTraining.plain(STEPS, dtype, clip)
        combinations.each_with_index.to_h do |(dims, options), i|
          [[dims, options].inspect, ParallelTraining.difference("#{dir}/#{i}", expected, dims, dtype, STEPS, clip, **options)]
        end
      end
    end
    worst = found.first
    assert(worst.all? { |_, difference| difference < TOLERANCE[dtype] }, worst.map { |name, difference| "#{name}: #{difference}" }.join("\n"))
  end
end
