# frozen_string_literal: true

require_relative "timeline"

module Torch
  module Distributed
    module Pipelining
      # How much of their time the ranks of a pipeline were idle, beside what the schedule makes inevitable.
      #
      #   puts schedule.report
      class Report
        # @return [Integer] steps that were measured
        attr_reader :steps

        # @return [Float] seconds of a step
        attr_reader :step_time

        # @return [Float] the share of the ranks' time in which they did nothing
        attr_reader :bubble

        # @return [Float] that of the schedule, if all stages took the same time, and messages none
        attr_reader :theory

        # @return [Float] that of the schedule with the stages' mean times
        attr_reader :theory_of_these_stages

        # @return [Float] the time of the slowest rank's actions to that of the mean one
        attr_reader :imbalance

        # @return [Hash{Integer => Hash{Symbol => Float}}] for each stage the mean seconds of an action, by kind
        attr_reader :stage_times

        # @api private
        # @param plan [Array<Array<Action>>]
        # @param summaries [Array<Hash>] each rank's {Measurement#summary}
        def initialize(name, plan, summaries)
          @name = name
          @steps = summaries.map { |each| each["steps"] }.min
          raise ArgumentError, "report: expected a step since the last one, there was none" if @steps.zero?

          # The first rank's, as a rule: a step ends there, while the others may have begun the next one.
          wall = summaries.map { |each| each["wall"] }.max
          busy = summaries.map { |each| each["times"].sum(&:last) }
          @micro_batches = plan.flatten.map(&:micro_batch).max + 1
          @ranks = summaries.size
          @step_time = wall / @steps
          @bubble = 1 - busy.sum / (@ranks * wall)
          @stage_times = Hash.new { |hash, stage| hash[stage] = {} }
          summaries.each { |each| each["times"].each { |stage, kind, count, sum| @stage_times[stage][kind.to_sym] = sum / count } }
          compare(plan)
        end

        # @return [String] a table for people
        def to_s
          percent = ->(share) { format("%.1f %%", 100 * share) }
          times = stage_times.sort.map do |stage, kinds|
            "  stage #{stage}: #{kinds.sort.map { |kind, seconds| format("%s %.3f ms", kind, 1000 * seconds) }.join(", ")}"
          end
          ["#{@name}, #{@ranks} ranks, #{@micro_batches} micro-batches, #{steps} steps of #{format("%.3f ms", 1000 * step_time)}",
            "bubble #{percent.call(bubble)}; in theory #{percent.call(theory)} for equal stages, " \
            "#{percent.call(theory_of_these_stages)} for these (the slowest rank takes #{format("%.2f", imbalance)} times the mean)",
            *times].join("\n")
        end

        private

        def compare(plan)
          time = ->(action) { @stage_times[action.stage][action.kind] || 0.0 }
          mean = plan.flatten.group_by(&:kind).transform_values { |list| list.sum(&time) / list.size }
          @theory = Timeline.of(plan) { |action| mean[action.kind] }.bubble
          @theory_of_these_stages = Timeline.of(plan, &time).bubble
          totals = plan.map { |list| list.sum(&time) }
          @imbalance = totals.max / (totals.sum / totals.size)
        end
      end
    end
  end
end
