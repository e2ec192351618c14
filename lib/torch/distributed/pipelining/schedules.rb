# frozen_string_literal: true

require_relative "schedule"

module Torch
  module Distributed
    module Pipelining
      # All forwards, then all backwards: a rank keeps the activations of all micro-batches.
      class ScheduleGPipe < Schedule
        # @api private
        def self.several_stages?
          true
        end

        private

        def plan_for(ranks, stages)
          Orders.fill_drain(ranks, stages, n_microbatches)
        end
      end

      # A backward follows each forward as soon as the pipeline is full: as long as {ScheduleGPipe}, but a stage keeps the activations of
      # as many micro-batches at most as there are stages from it to the last. One stage for each rank. Fewer micro-batches than
      # stages do, but leave most ranks idle.
      class Schedule1F1B < Schedule
        private

        def plan_for(ranks, stages)
          unless stages == ranks
            raise ArgumentError, "stages: Schedule1F1B takes one for each of #{ranks} ranks, got #{stages}: use ScheduleInterleaved1F1B"
          end

          Orders.one_forward_one_backward(ranks, stages, n_microbatches)
        end
      end

      # The same with several stages for each rank, which makes the bubble as many times smaller, and messages as many times more.
      class ScheduleInterleaved1F1B < Schedule
        # @api private
        def self.several_stages?
          true
        end

        private

        def plan_for(ranks, stages)
          Orders.one_forward_one_backward(ranks, stages, n_microbatches, ahead: 2)
        end
      end

      # {Schedule1F1B}, or {ScheduleInterleaved1F1B}, with backward in two parts: the gradients of a stage's inputs, for which the
      # stage before it waits, and those of its weights, which are computed where a rank would be idle otherwise. With one stage for
      # each rank it is known as ZB-H1, and keeps as many activations as {Schedule1F1B}; what the weights' gradients need is kept
      # longer.
      #
      # The weights and biases of the linear layers are computed apart, those of all other parameters with the inputs' gradients. Where
      # FSDP shards a stage, its whole backward is computed at once.
      class ScheduleInterleavedZeroBubble < Schedule
        # @api private
        def self.several_stages?
          true
        end

        def initialize(stages, **options)
          super
          @stages.each { |stage| SplitLinear.all_of(stage.submodule) }
        end

        private

        def plan_for(ranks, stages)
          Orders.one_forward_one_backward(ranks, stages, n_microbatches, split: true)
        end
      end
    end
  end
end
