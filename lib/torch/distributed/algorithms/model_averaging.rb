# frozen_string_literal: true

require "torch/distributed"

module Torch
  module Distributed
    module Algorithms
      # Training in which processes take steps of their own and average their models now and then.
      module ModelAveraging
        class << self
          # Makes parameters the mean of all processes' ones, in place. A collective call.
          #
          # @param params [Array<Torch::NN::Parameter>, Array<Hash>] parameters, or an optimizer's `param_groups`; those without a
          #   gradient are left alone
          # @param process_group [ProcessGroup, nil] nil: the default group
          def average_parameters(params, process_group = nil)
            by_dtype = with_gradients(params).group_by(&:dtype)
            by_dtype.each_value do |tensors|
              Distributed.all_reduce_coalesced(tensors.map(&:detach), op: ReduceOp::AVG, group: process_group)
            end
            nil
          end

          private

          def with_gradients(params)
            flat = params.flat_map do |each|
              case each
              when Torch::Tensor then [each]
              when Hash then each.fetch(:params).to_a
              else raise ArgumentError, "params: expected parameters or an optimizer's param_groups, got #{each.inspect} (#{each.class})"
              end
            end
            flat.select(&:grad).uniq(&:object_id)
          end
        end

        # Counts steps and says when models are averaged.
        class ModelAverager
          # @return [ProcessGroup, nil]
          attr_reader :process_group

          # @return [Integer] how often {#average_parameters} was called
          attr_accessor :step

          # @param process_group [ProcessGroup, nil] nil: the default group
          def initialize(process_group = nil)
            @process_group = process_group
            @step = 0
          end

          # Called after each step of the optimizer, on all processes.
          #
          # @param params [Array<Torch::NN::Parameter>, Array<Hash>] parameters, or an optimizer's `param_groups`
          def average_parameters(params)
            raise NotImplementedError, "#{self.class}#average_parameters: expected to be defined"
          end
        end

        # Averages models every `period` steps, once the first `warmup_steps` are over. With the hook `:post_local_sgd`,
        # whose `start_local_sgd_iter` equals `warmup_steps`, this is post-local SGD.
        class PeriodicModelAverager < ModelAverager
          # @return [Integer]
          attr_reader :period, :warmup_steps

          # @param period [Integer] how many steps there are from one averaging to the next
          # @param warmup_steps [Integer] how many steps there are before the first
          # @param process_group [ProcessGroup, nil] nil: the default group
          def initialize(period:, warmup_steps: 0, process_group: nil)
            super(process_group)
            unless period.is_a?(Integer) && period.positive?
              raise ArgumentError, "period: expected a positive Integer, got #{period.inspect}"
            end
            unless warmup_steps.is_a?(Integer) && !warmup_steps.negative?
              raise ArgumentError, "warmup_steps: expected an Integer of at least 0, got #{warmup_steps.inspect}"
            end

            @period = period
            @warmup_steps = warmup_steps
            return unless period == 1

            Distributed._warn "period: 1 averages models in each step, which costs what averaging gradients does: DistributedDataParallel alone " \
              "is the better choice"
          end

          # @see ModelAverager#average_parameters
          def average_parameters(params)
            due = @step >= @warmup_steps && ((@step - @warmup_steps) % @period).zero?
            ModelAveraging.average_parameters(params, @process_group) if due
            @step += 1
            nil
          end
        end
      end
    end
  end
end
