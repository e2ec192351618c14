# frozen_string_literal: true

module Torch
  module Distributed
    class Parallel
      # Runs this process's stages, one or several, along with those of the others.
      #
      # @api private
      class Pipeline
        SCHEDULES = {
          gpipe: Pipelining::ScheduleGPipe, "1f1b": Pipelining::Schedule1F1B, interleaved_1f1b: Pipelining::ScheduleInterleaved1F1B,
          interleaved_zero_bubble: Pipelining::ScheduleInterleavedZeroBubble
        }.freeze
        # For each process along the pipeline: of a step some sixth is bubble then.
        MICROBATCHES = 4
        private_constant :SCHEDULES, :MICROBATCHES

        # @param name [Object] what was given as the schedule
        # @raise [ArgumentError] if it is none, or `count` is not a number of micro-batches
        def self.check(name, count)
          known = SCHEDULES.keys
          raise ArgumentError, "schedule: expected one of #{known.inspect}, got #{name.inspect}" unless known.include?(name.to_s.to_sym)
          return if count.nil? || (count.is_a?(Integer) && count.positive?)

          raise ArgumentError, "microbatches: expected 1 or more, or nil, got #{count.inspect}"
        end

        # @param modules [Array<Torch::NN::Module>] this process's stages
        # @param dims [Dimensions]
        # @param ties [Array<Hash{Integer => String}>] see {Pipelining::Schedule}
        def initialize(modules, dims, schedule, microbatches, loss_fn, ties)
          @modules = modules
          @stages = modules.each_with_index.map do |mod, i|
            Pipelining::PipelineStage.new(mod, stage_index: dims.pp_rank + i * dims.pp, num_stages: modules.size * dims.pp, group: dims.pp_group)
          end
          @count = microbatches || ((dims.pp > 1) ? MICROBATCHES * dims.pp : 1)
          @schedule = SCHEDULES.fetch(schedule.to_sym).new(@stages, n_microbatches: @count, loss_fn: loss_fn, tie: ((dims.pp > 1) ? ties : []))
        end

        # @return [Float] the mean loss over the rows, on all processes of the pipeline
        def step(inputs, target)
          @schedule.step(*inputs, target: target, losses: (losses = []), return_outputs: false)
          rows = Nested.tensors(target).first.size(0)
          losses.each_with_index.sum { |loss, i| loss.to(dtype: :float64).item * (rows / @count + ((i < rows % @count) ? 1 : 0)) } / rows
        end

        # Of all rows at once.
        #
        # @return [Torch::Tensor, Array<Torch::Tensor>] on all processes of the pipeline
        def output(inputs)
          @once ||= Pipelining::ScheduleGPipe.new(@stages, n_microbatches: 1)
          @once.eval(*inputs, return_outputs: :all)
        end

        def train(mode)
          @modules.each { |mod| mod.train(mode) }
        end
      end
      private_constant :Pipeline
    end
  end
end
