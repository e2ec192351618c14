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

          private

          def check_warmup_steps(warmup_steps)
            return warmup_steps if warmup_steps.is_a?(Integer) && !warmup_steps.negative?

            raise ArgumentError, "warmup_steps: expected an Integer of at least 0, got #{warmup_steps.inspect}"
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

            @period = period
            @warmup_steps = check_warmup_steps(warmup_steps)
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

        # Averages models within small groups often, within larger ones less often, and within all of the group least often.
        #
        #   # Of 16 processes: pairs every 2 steps, fours every 4, all every 16.
        #   averager = HierarchicalModelAverager.new(period_group_size_dict: {2 => 2, 4 => 4, 16 => 16}, warmup_steps: 100)
        #
        # In a step that several periods divide, only the groups of the longest one average. Steps are counted from 0, those of
        # the warm-up among them. Groups are of consecutive ranks, so on machines with as many processes each as the smallest
        # groups have, these do not use the network.
        class HierarchicalModelAverager < ModelAverager
          # @return [Integer]
          attr_reader :warmup_steps

          # @return [Hash{Integer => ProcessGroup, nil}] this process's group for each period; nil: the default group
          attr_reader :period_process_group_dict

          # Makes the groups: a collective call of the processes of `process_group`.
          #
          # @param period_group_size_dict [Hash{Integer => Integer}] for each period, in rising order, how many processes a group
          #   has: divisors of the size of `process_group`, the last of them all of it
          # @param warmup_steps [Integer] how many steps there are before the first averaging
          # @param process_group [ProcessGroup, nil] nil: the default group
          # @raise [ArgumentError, TypeError] naming what is wrong; before any process waits
          def initialize(period_group_size_dict:, warmup_steps: 0, process_group: nil)
            super(process_group)
            @warmup_steps = check_warmup_steps(warmup_steps)
            size = Distributed.get_world_size(process_group)
            check_periods(period_group_size_dict)
            check_group_sizes(period_group_size_dict, size)
            @period_process_group_dict = period_group_size_dict.transform_values do |group_size|
              (group_size == size) ? process_group : Distributed.new_subgroups(group_size, group: process_group).first
            end.freeze
            return unless period_group_size_dict.keys.last == 1

            warn "period_group_size_dict: 1 as the longest period averages models in each step, which costs what averaging gradients " \
              "does: DistributedDataParallel alone is the better choice"
          end

          # @see ModelAverager#average_parameters
          def average_parameters(params)
            if @step >= @warmup_steps && (period = @period_process_group_dict.keys.reverse.find { |each| (@step % each).zero? })
              ModelAveraging.average_parameters(params, @period_process_group_dict[period])
            end
            @step += 1
            nil
          end

          private

          def check_periods(sizes)
            unless sizes.is_a?(Hash) && !sizes.empty?
              raise ArgumentError, "period_group_size_dict: expected a Hash of periods and group sizes, got #{sizes.inspect}"
            end
            wrong = sizes.keys.reject { |period| period.is_a?(Integer) && period.positive? }
            raise ArgumentError, "period_group_size_dict: expected positive Integers as periods, got #{wrong.first.inspect}" unless wrong.empty?
            return if sizes.keys.each_cons(2).all? { |shorter, longer| shorter < longer }

            raise ArgumentError, "period_group_size_dict: expected periods in rising order, got #{sizes.keys.join(", ")}"
          end

          def check_group_sizes(sizes, all)
            raise ArgumentError, "process_group: expected a group that this process is in" if all == -1

            wrong = sizes.values.reject { |size| size.is_a?(Integer) && size.positive? && (all % size).zero? }
            unless wrong.empty?
              raise ArgumentError, "period_group_size_dict: expected divisors of the group's size #{all}, got #{wrong.first.inspect}"
            end
            return if sizes.values.last == all

            raise ArgumentError, "period_group_size_dict: expected all #{all} processes of the group as the last group size, " \
              "got #{sizes.values.last}"
          end
        end
      end
    end
  end
end
