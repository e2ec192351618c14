# frozen_string_literal: true

module Torch
  module NN
    module Parallel
      class DistributedDataParallel < Module
        # Statistics of the model's training, under PyTorch's names.
        #
        # @api private
        class Logging
          # Of these iterations, and of one in so many later on, the times are looked at.
          FIRST = 10
          RATE = 100
          TIMES = %i[forward_compute_time backward_compute_time backward_comm_time backward_compute_comm_overlap_time].freeze
          private_constant :FIRST, :TIMES

          # @return [Integer]
          attr_reader :rate

          def initialize
            @rate = RATE
            @seen = 0
            @samples = 0
            @sums = Array.new(TIMES.size, 0)
          end

          def rate=(rate)
            unless rate.is_a?(Integer) && rate.positive?
              raise ArgumentError, "sample_rate: expected a positive Integer, got #{rate.inspect}"
            end

            @rate = rate
          end

          # Before each forward whose gradients are averaged; the round that has ended last is looked at.
          def sample(core)
            @seen += 1
            return unless @seen.between?(2, FIRST + 1) || (@seen % @rate).zero?

            durations = durations_of(core.times)
            return if durations.value?(nil)

            @samples += 1
            TIMES.each_with_index { |name, index| @sums[index] += durations[name] }
          end

          # @return [Hash] the last round's times, and those sampled on the average, in ns
          def times(core)
            times = core.times
            durations = durations_of(times)
            averages = TIMES.each_with_index.to_h do |name, index|
              [:"avg_#{name}", @samples.zero? ? nil : @sums[index] / @samples]
            end
            durations.merge(averages,
              forward_compute_time_start: times[:prepared],
              backward_compute_time_start: times[:first_ready],
              backward_comm_time_start: times[:first_launch],
              backward_compute_time_end: times[:last_ready],
              backward_comm_time_end: times[:finished])
          end

          private

          def durations_of(times)
            prepared, first, last, launch, finished = times.values_at(:prepared, :first_ready, :last_ready, :first_launch, :finished)
            {
              forward_compute_time: between(prepared, first),
              backward_compute_time: between(first, last),
              backward_comm_time: between(launch, finished),
              backward_compute_comm_overlap_time: between(launch, last)
            }
          end

          def between(from, to)
            from && to && [to - from, 0].max
          end
        end
        private_constant :Logging
      end
    end
  end
end
