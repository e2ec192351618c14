# frozen_string_literal: true

module Torch
  module Distributed
    # Operations of all ranks of a group. Each rank must call the same ones in the same order. With
    # `async_op: true` they return a {Work} at once; its tensors are in use until {Work#wait} has returned.
    #
    # A process that calls one on a group that it is not in ({GroupMember::NON_GROUP_MEMBER}) is warned, and nothing is
    # done or returned. Ranks are global ones (`src:`); those within the group have arguments of their own (`group_src:`).
    #
    # Tensors may require grad (their memory is worked on, as in PyTorch) and need not be contiguous (a copy is
    # used and copied back). Sparse ones are refused.
    module Collectives
      # Combines `tensor` over all ranks, in place.
      #
      # @param tensor [Torch::Tensor] of the same shape and dtype on every rank
      # @param op [Integer, Symbol, String, ReduceOp::PremulSum] ReduceOp::SUM, :avg, ReduceOp.premul_sum(0.5) …
      # @param group [ProcessGroup, nil] nil: the default group
      # @param async_op [Boolean]
      # @return [Torch::Tensor, Work, nil] the tensor; with `async_op` a handle; nil on a process that is not in the group
      def all_reduce(tensor, op: ReduceOp::SUM, group: nil, async_op: false)
        perform("all_reduce", group, async_op, tensor, tensor) do |members, async, batch|
          next batch.reduce(tensor, op) if batch

          into("tensor", tensor) { |memory| members._all_reduce(memory, op, async) }
        end
      end

      # Combines several tensors of one dtype in one operation, each in place.
      #
      # @param tensors [Array<Torch::Tensor>]
      # @return [nil, Work]
      # @see #all_reduce for the other arguments
      def all_reduce_coalesced(tensors, op: ReduceOp::SUM, group: nil, async_op: false)
        perform("all_reduce_coalesced", group, async_op, tensors) do |members, async|
          check_tensors("tensors", tensors)
          into_list("tensors", tensors) { |memories| members._all_reduce_coalesced(memories, op, async) }
        end
      end

      # Combines `tensor` over all ranks into that of rank `dst`; the others' stay as they are.
      #
      # @param dst [Integer, nil] the global rank of the process that gets the result
      # @param group_dst [Integer, nil] instead of `dst`: its rank within the group
      # @return [Torch::Tensor, Work, nil] the tensor; with `async_op` a handle; nil on a process that is not in the group
      # @see #all_reduce for the other arguments
      def reduce(tensor, dst: nil, op: ReduceOp::SUM, group: nil, async_op: false, group_dst: nil)
        perform("reduce", group, async_op, tensor, tensor) do |members, async|
          root = rank_in_group(members, "dst", dst, group_dst)
          into("tensor", tensor) { |memory| members._reduce(memory, root, op, async) }
        end
      end

      # Copies `tensor` of rank `src` to all others.
      #
      # @param src [Integer, nil] the global rank of the process that has the values
      # @param group_src [Integer, nil] instead of `src`: its rank within the group
      # @return [Torch::Tensor, Work, nil] the tensor; with `async_op` a handle; nil on a process that is not in the group
      # @see #all_reduce for the other arguments
      def broadcast(tensor, src: nil, group: nil, async_op: false, group_src: nil)
        perform("broadcast", group, async_op, tensor, tensor) do |members, async|
          root = rank_in_group(members, "src", src, group_src)
          into("tensor", tensor) { |memory| members._broadcast(memory, root, async) }
        end
      end

      # Returns when every rank has come to it.
      #
      # @param device_ids [Array<Integer>, nil] for PyTorch's sake; a group has one device
      # @param timeout [Numeric, nil] seconds; nil: the group's
      # @return [nil, Work]
      def barrier(group: nil, async_op: false, device_ids: nil, timeout: nil)
        perform("barrier", group, async_op, nil) do |members, async|
          check_timeout(timeout) unless timeout.nil?
          members._barrier(timeout, async)
        end
      end

      # A barrier that names the ranks that do not arrive. The first rank whose time is over ends it for all, with the same
      # error. The group can be used again after a failure.
      #
      # @param timeout [Numeric, nil] seconds; nil: the group's
      # @param wait_all_ranks [Boolean] whether to name all that are missing, rather than the first and how many more there are
      # @return [nil]
      # @raise [TimeoutError]
      def monitored_barrier(group: nil, timeout: nil, wait_all_ranks: false)
        return unless (group = member_group(group, "monitored_barrier"))

        check_timeout(timeout) unless timeout.nil?
        group._monitored_barrier(timeout, wait_all_ranks)
      end
    end
  end
end
