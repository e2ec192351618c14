# frozen_string_literal: true

require_relative "timeline"

module Torch
  module Distributed
    module Pipelining
      # The times of a process's actions, of all steps since {#clear}.
      #
      # @api private
      class Measurement
        # @return [Array<Timeline::Span>] of the last step; in seconds
        attr_reader :spans

        def initialize
          @spans = []
          clear
        end

        def clear
          @wall = 0.0
          @steps = 0
          @times = Hash.new { |hash, key| hash[key] = [0, 0.0] }
        end

        # Around a step.
        def step
          @spans = []
          start = now
          yield
          @wall += now - start
          @steps += 1
        end

        # Around an action, but for its waits; shows it in the trace.
        def measure(action, &block)
          start = now
          Distributed.trace("#{action.kind}#{action.micro_batch}", lane: "pipeline", stage: action.stage, &block)
          @spans << Timeline::Span.new(action, start, now)
          count_and_sum = @times[[action.stage, action.kind]]
          count_and_sum[0] += 1
          count_and_sum[1] += now - start
        end

        # @return [Hash] as JSON has it
        def summary
          {"steps" => @steps, "wall" => @wall, "times" => @times.map { |(stage, kind), (count, sum)| [stage, kind.to_s, count, sum] }}
        end

        private

        def now
          Process.clock_gettime(Process::CLOCK_MONOTONIC)
        end
      end
    end
  end
end
