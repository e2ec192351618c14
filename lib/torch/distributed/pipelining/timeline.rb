# frozen_string_literal: true

require_relative "action"

module Torch
  module Distributed
    module Pipelining
      # When each action of a plan begins and ends, if every action takes a given time and messages take none.
      class Timeline
        # When one action begins and ends.
        #
        # @!attribute [r] action
        #   @return [Action]
        # @!attribute [r] start
        #   @return [Numeric]
        # @!attribute [r] finish
        #   @return [Numeric]
        Span = Struct.new(:action, :start, :finish)

        # @return [Array<Array<Span>>] by rank
        attr_reader :ranks

        class << self
          # @param plan [Array<Array<Action>>] each rank's actions in order
          # @yieldparam action [Action]
          # @yieldreturn [Numeric] how long it takes
          # @return [Timeline]
          # @raise [ArgumentError] if actions wait for each other in a circle, or for some that are in no list
          def of(plan, &cost)
            ends = {}
            ranks = plan.map { [] }
            each_ready(plan, ends) do |rank, action, after|
              start = [ranks[rank].last&.finish || 0, *after.map { |other| ends.fetch(other) }].max
              ends[action] = start + cost.call(action)
              ranks[rank] << Span.new(action, start, ends[action])
            end
            new(ranks)
          end

          # Puts the lists of several ranks into one, for a process that is all of them.
          #
          # @return [Array<Action>]
          def merge(plan)
            of(plan) { |action| (action.kind == :F) ? 1 : 2 }.ranks.flatten.sort_by.with_index { |span, i| [span.start, i] }.map(&:action)
          end

          private

          # Takes turns: whatever can be done of each rank's list.
          def each_ready(plan, done)
            last = plan.flatten.map(&:stage).max
            backward = plan.flatten.find(&:backward?)&.kind
            left = plan.map(&:dup)
            until left.all?(&:empty?)
              before = done.size
              left.each_with_index do |list, rank|
                while (action = list.first) && (after = needs(action, last, backward)).all? { |other| done.key?(other) }
                  yield rank, list.shift, after
                end
              end
              raise ArgumentError, "plan: #{left.filter_map(&:first).join(", ")} wait for each other" if done.size == before
            end
          end

          def needs(action, last, backward)
            stage, kind, i = action.to_a
            case kind
            when :F then stage.zero? ? [] : [Action.new(stage - 1, :F, i)]
            when :W then [Action.new(stage, backward, i)]
            else [Action.new(stage, :F, i), *([Action.new(stage + 1, backward, i)] if stage < last)]
            end
          end
        end

        # @param ranks [Array<Array<Span>>] from measured times, for instance
        def initialize(ranks)
          @ranks = ranks
        end

        # @return [Numeric] from the first action's start to the last one's end
        def length
          spans = ranks.flatten
          spans.map(&:finish).max - spans.map(&:start).min
        end

        # @return [Float] the share of all ranks' time in which they do nothing
        def bubble
          busy = ranks.flatten.sum { |span| span.finish - span.start }
          1 - busy.fdiv(ranks.size * length)
        end

        # @param title [String]
        # @return [String] a picture of it
        def to_svg(title = "Pipeline")
          Drawing.new(self, title).to_svg
        end
      end
    end
  end
end

require_relative "drawing"
