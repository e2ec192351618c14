# frozen_string_literal: true

module Torch
  module NN
    module Utils
      # The norm of tensors that several groups of ranks divide, some by one, others by several or by none. Each group sums once, over
      # all the tensors that it divides.
      #
      # @api private
      class DividedNorm
        # @param list [Array<Torch::Tensor>] parameters for instance
        # @param further [Torch::Distributed::ProcessGroup, Array, nil] whose ranks have other tensors
        # @param uncounted [Enumerable<Torch::Tensor>] those of the list that a rank of `further` counts as well
        def initialize(list, further, uncounted)
          @further = [*further].each { |group| check(group) }.uniq(&:ranks)
          left_out = uncounted.to_h { |tensor| [tensor, true] }.compare_by_identity
          @whole = left_out.empty?
          counted = list.reject { |tensor| left_out.key?(tensor) }.uniq(&:object_id)
          @parts = counted.group_by { |tensor| groups_of(tensor).map(&:ranks) }.values.map { |tensors| [groups_of(tensors.first), tensors] }
        end

        # @return [Boolean] whether one group, or none, divides all of them
        def simple?
          @whole && @parts.size <= 1 && groups.size <= 1
        end

        # @return [Torch::Distributed::ProcessGroup, nil]
        def group
          groups.first
        end

        # The same on all ranks. A collective call.
        #
        # @param order [Float]
        # @yieldparam tensor [Torch::Tensor]
        # @yieldreturn [Torch::Tensor, nil] of which the norm is
        # @return [Float]
        def norm(order)
          @order = order
          local([]) # says what is wrong with the order
          sums = @parts.map { |groups, tensors| [groups, power(local(tensors.filter_map { |tensor| yield tensor }))] }
          (groups - @further).each { |group| sum_over(group, sums) }
          all = @further.inject(combine(sums.map(&:last))) { |sum, group| over(group, [sum]).first }
          (order.infinite? || order == 1) ? all : all**(1 / order)
        end

        private

        def check(group)
          return if group.is_a?(Torch::Distributed::ProcessGroup)

          raise TypeError, "process_group: expected a ProcessGroup that this process is in, several of them, or nil, got #{group.inspect}"
        end

        # In the order of the list, which is the same on the ranks that divide it; the further ones last.
        def groups
          @parts.flat_map(&:first).uniq(&:ranks) + @further
        end

        # Those beside the further ones.
        def groups_of(tensor)
          further = @further.map(&:ranks)
          Torch::Distributed::Tensor.dividing_groups(tensor).uniq(&:ranks).reject { |group| further.include?(group.ranks) }
        end

        def local(tensors)
          Torch::Distributed.send(:_total_norm, tensors, @order, nil)
        end

        def sum_over(group, sums)
          concerned = sums.select { |groups, _| groups.any? { |each| each.ranks == group.ranks } }
          over(group, concerned.map(&:last)).zip(concerned) { |sum, row| row[1] = sum }
        end

        def power(norm)
          @order.infinite? ? norm : norm**@order
        end

        def combine(values)
          return values.sum(0.0) unless @order.infinite?

          values.find(&:nan?) || [0.0, *values].max
        end

        # Which backends find the largest of need not be right for NaN.
        def over(group, values)
          return all_reduced(group, values, :SUM) unless @order.infinite?

          flags = values.map { |value| value.nan? ? 1.0 : 0.0 }
          largest, nan = all_reduced(group, values.map { |value| value.nan? ? 0.0 : value } + flags, :MAX).each_slice(values.size).to_a
          largest.zip(nan).map { |value, flag| flag.positive? ? Float::NAN : value }
        end

        def all_reduced(group, values, operation)
          tensor = Torch::Distributed.send(:group_tensor, group, values, :float64)
          Torch::Distributed.all_reduce(tensor, op: Torch::Distributed::ReduceOp.const_get(operation), group: group)
          tensor.to_a
        end
      end
      private_constant :DividedNorm
    end
  end
end
