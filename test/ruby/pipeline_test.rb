# frozen_string_literal: true

require_relative "pipelined_training"

# Pipelines follow one process: schedules, numbers of ranks, micro-batches of different sizes.
class PipelineTest < Minitest::Test
  include PipelinedTraining

  # By name: the class, stages of a rank, micro-batches.
  SCHEDULES = {
    gpipe: [:ScheduleGPipe, 1, 4], gpipe_of_several_stages: [:ScheduleGPipe, 2, 3], one_forward_one_backward: [:Schedule1F1B, 1, 4],
    few_micro_batches: [:Schedule1F1B, 1, 2], interleaved: [:ScheduleInterleaved1F1B, 2, 4],
    zero_bubble: [:ScheduleInterleavedZeroBubble, 1, 4], interleaved_zero_bubble: [:ScheduleInterleavedZeroBubble, 2, 4]
  }.freeze

  # The rows of some batches are no multiple of the micro-batches, and change.
  ROWS = [8, 10, 7, 10].freeze

  def make(schedule, stages, loss: MSE)
    name, _, micro_batches = SCHEDULES.fetch(schedule)
    Pipelining.const_get(name).new(stages, n_microbatches: micro_batches, loss_fn: loss)
  end

  (1..4).each do |size|
    define_method(:"test_schedules_on_#{size}_ranks") do
      found = world(size) do |rank|
        SCHEDULES.keys.to_h do |name|
          per_rank = SCHEDULES.fetch(name)[1]
          next [name, 0] if size == 3 && per_rank == 2 # micro-batches that it can't divide

          schedule = make(name, stages_of(layers, rank, size, per_rank: per_rank))
          [name, follow(schedule, layers, rows: ROWS)]
        end
      end
      found.each { |each| each.each { |name, difference| assert_operator difference, :<, 1e-10, name.to_s } }
    end
  end

  # On several devices, for instance.
  def test_all_stages_in_one_process
    found = Distributed.fork_world(1) do
      SCHEDULES.keys.map do |name|
        parts = Pipelining.split(layers, at: %w[4 8 12])
        schedule = make(name, parts.map { |part| Pipelining::PipelineStage.new(part) })
        follow(schedule, layers, rows: ROWS)
      end
    end
    assert_operator found.flatten.max, :<, 1e-10
  end

  def test_a_stage_of_each_rank_without_numbers
    found = world(2) do |rank|
      list = layers.children
      stage = Pipelining::PipelineStage.new(layers: list.each_slice(8).to_a[rank])
      schedule = Pipelining::Schedule1F1B.new(stage, n_microbatches: 2, loss_fn: MSE)
      x, y = batch(8)
      schedule.step(x, target: y, losses: losses = [])
      plain = MSE.call(layers.call(x), y).item
      [stage.stage_index, stage.num_stages, (mean(losses, 8) - plain).abs]
    end
    assert_equal [[0, 2], [1, 2]], found.map { |each| each.first(2) }
    assert_operator found.map(&:last).max, :<, 1e-12
  end
end
