# frozen_string_literal: true

require_relative "timeline"

module Torch
  module Distributed
    module Pipelining
      # A message of a step from one rank to another: {Link::FORWARD} or {Link::LATE} for the stage that consumes an activation,
      # {Link::BACKWARD} for the one that gets its gradient.
      #
      # @api private
      Message = Struct.new(:kind, :stage, :micro_batch, :from, :to) do
        # @return [Array(Integer, Integer)] stage and micro-batch
        def key
          [stage, micro_batch]
        end
      end

      # The messages of a step in one order, the same on all ranks. NCCL has no tags, and one kernel may run at a time: messages
      # that two ranks begin in different orders would wait for each other.
      #
      # The order is that of time, if messages take none, so that a message comes after the action that produces it and before
      # the one that consumes it. It contains the actions as well, each at its end: what precedes an action can begin
      # before it does, and be under way beside it. Tensors whose shapes the receiver could not know come just before the action
      # that needs them, since the receiver has to wait for their header.
      #
      # @api private
      module MessageOrder
        class << self
          # @param plan [Array<Array<Action>>] each rank's actions in order; stage s is on rank s modulo their number
          # @return [Array<Action, Message>] of all ranks
          def of(plan)
            last = plan.flatten.map(&:stage).max
            spans = Timeline.of(plan) { |action| (action.kind == :B) ? 2 : 1 }.ranks.flatten
            moments = spans.flat_map do |span|
              action = span.action
              # At the same time gradients come first, as they shorten the pipeline; and on a way along several ranks the receive
              # of each before its send, so that it can begin.
              place = action.backward? ? [0, -action.stage] : [1, action.stage]
              ending = [action, result_of(action, plan.size, last)]
              [[[span.finish, 0, *place], ending], [[span.start, 1, *place], [late(action, plan.size)]]]
            end
            moments.sort_by(&:first).flat_map(&:last).compact
          end

          # @return [Array<Action, Message>] of one rank
          def for_rank(plan, rank)
            of(plan).select { |each| each.is_a?(Message) ? [each.from, each.to].include?(rank) : each.stage % plan.size == rank }
          end

          private

          def result_of(action, ranks, last)
            return if action.kind == :W

            kind, to = action.backward? ? [Link::BACKWARD, action.stage - 1] : [Link::FORWARD, action.stage + 1]
            message(kind, to, action, action.stage, ranks) if to.between?(0, last)
          end

          def late(action, ranks)
            message(Link::LATE, action.stage, action, action.stage - 1, ranks) if action.kind == :F && action.stage.positive?
          end

          def message(kind, stage, action, from, ranks)
            Message.new(kind, stage, action.micro_batch, from % ranks, stage % ranks) if from % ranks != stage % ranks
          end
        end
      end
    end
  end
end
