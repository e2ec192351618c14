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
    # used and copied back).
    module Collectives
      # Combines `tensor` over all ranks, in place.
      #
      # @param tensor [Torch::Tensor] of the same shape and dtype on every rank
      # @param op [Integer, Symbol, String, ReduceOp::PremulSum] ReduceOp::SUM, :avg, ReduceOp.premul_sum(0.5) …
      # @param group [ProcessGroup, nil] nil: the default group
      # @param async_op [Boolean]
      # @return [Torch::Tensor, Work] the tensor; with `async_op` a handle
      def all_reduce(tensor, op: ReduceOp::SUM, group: nil, async_op: false)
        return unless (group = member_group(group, "all_reduce"))

        number, factor = ReduceOp.resolve(op)
        in_place(tensor, async_op) { |memory| group._all_reduce(memory, number, factor, async_op) }
      end

      # Copies `tensor` of rank `src` to all others.
      #
      # @param src [Integer, nil] the global rank of the process that has the values
      # @param group_src [Integer, nil] instead of `src`: its rank within the group
      # @return [Torch::Tensor, Work] the tensor; with `async_op` a handle
      # @see #all_reduce for the other arguments
      def broadcast(tensor, src: nil, group: nil, async_op: false, group_src: nil)
        return unless (group = member_group(group, "broadcast"))

        root = rank_in_group(group, "src", src, group_src)
        in_place(tensor, async_op) { |memory| group._broadcast(memory, root, async_op) }
      end

      # Returns when every rank has come to it.
      #
      # @return [nil, Work]
      def barrier(group: nil, async_op: false)
        member_group(group, "barrier")&._barrier(async_op)
      end

      # Gathers every rank's `tensor` into `tensor_list`, by rank.
      #
      # @param tensor_list [Array<Torch::Tensor>] one for each rank, shaped like `tensor`
      # @param tensor [Torch::Tensor]
      # @return [nil, Work]
      def all_gather(tensor_list, tensor, group: nil, async_op: false)
        return unless (group = member_group(group, "all_gather"))

        check_list("tensor_list", tensor_list, group, tensor)
        all = tensor.detach.new_empty([group.size, *tensor.shape])
        work = all_gather_into_tensor(all, tensor, group: group, async_op: async_op)
        finish(work) do
          Torch.no_grad { tensor_list.each_with_index { |each, rank| each.copy!(all[rank]) } }
        end
      end

      # Gathers every rank's `input` into one tensor, end to end by rank.
      #
      # @param output [Torch::Tensor] world_size times as many elements as `input`
      # @param input [Torch::Tensor]
      # @return [nil, Work]
      def all_gather_into_tensor(output, input, group: nil, async_op: false)
        return unless (group = member_group(group, "all_gather_into_tensor"))

        input = contiguous("input", input)
        into(output, async_op) { |memory| group._all_gather(memory, input, async_op) }
      end

      # Combines `input_list` over all ranks; rank r gets part r in `output`.
      #
      # @param output [Torch::Tensor]
      # @param input_list [Array<Torch::Tensor>] one for each rank, shaped like `output`
      # @return [nil, Work]
      # @see #all_reduce for `op`
      def reduce_scatter(output, input_list, op: ReduceOp::SUM, group: nil, async_op: false)
        return unless (group = member_group(group, "reduce_scatter"))

        check_list("input_list", input_list, group, output)
        all = Torch.no_grad { Torch.stack(input_list) }
        reduce_scatter_tensor(output, all, op: op, group: group, async_op: async_op)
      end

      # Combines `input` over all ranks; rank r gets its part r in `output`.
      #
      # @param output [Torch::Tensor]
      # @param input [Torch::Tensor] world_size times as many elements as `output`
      # @return [nil, Work]
      # @see #all_reduce for `op`
      def reduce_scatter_tensor(output, input, op: ReduceOp::SUM, group: nil, async_op: false)
        return unless (group = member_group(group, "reduce_scatter_tensor"))

        number, factor = ReduceOp.resolve(op)
        input = contiguous("input", input)
        into(output, async_op) { |memory| group._reduce_scatter(memory, input, number, factor, async_op) }
      end

      private

      def check_tensor(name, tensor)
        return if tensor.is_a?(Torch::Tensor)

        raise TypeError, "#{name}: expected a Torch::Tensor, got #{tensor.inspect} (#{tensor.class})"
      end

      # Tensors that are not strided are left to libtddp, which says why it does not take them.
      def strided_apart?(tensor)
        tensor.layout == :strided && !tensor.contiguous?
      end

      def contiguous(name, tensor)
        check_tensor(name, tensor)
        strided_apart?(tensor) ? Torch.no_grad { tensor.contiguous } : tensor
      end

      # Yields `tensor` or a contiguous copy, which is copied back when the operation is done.
      def in_place(tensor, async_op)
        check_tensor("tensor", tensor)
        work = into(tensor, async_op) { |memory| yield memory }
        async_op ? work : tensor
      end

      def into(tensor, async_op)
        check_tensor("output", tensor)
        return yield(tensor) unless strided_apart?(tensor)

        memory = Torch.no_grad { tensor.contiguous }
        finish(yield(memory)) { Torch.no_grad { tensor.copy!(memory) } }
      end

      # Runs the block once the operation is done: now, or when its handle is waited for.
      def finish(work, &block)
        return work.finally(block) if work

        block.call
        nil
      end

      def check_list(name, list, group, like)
        check_tensor("tensor", like)
        unless list.is_a?(Array) && list.size == group.size
          raise ArgumentError, "#{name}: expected an Array of #{group.size} tensors, one for each rank, got " +
            (list.is_a?(Array) ? "#{list.size} of them" : list.class.name)
        end

        list.each_with_index do |tensor, index|
          check_tensor("#{name}[#{index}]", tensor)
          next if tensor.shape == like.shape && tensor.dtype == like.dtype

          raise ArgumentError, "#{name}[#{index}]: expected #{like.dtype} of shape #{like.shape}, " \
            "got #{tensor.dtype} of shape #{tensor.shape}"
        end
      end
    end
  end
end
