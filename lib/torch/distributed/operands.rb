# frozen_string_literal: true

module Torch
  module Distributed
    # What all operations do with their arguments: the group, the returned handle, tensors that do not
    # lie in one piece, lists by rank. Everything is checked before anything is sent.
    #
    # @api private
    module Operands
      private

      # Runs the block with the group and whether to return a handle, unless this process is not in the group. In
      # {Coalescing#coalescing_manager} the handle becomes part of that one's, and the block gets the batch too.
      #
      # @param outputs [Torch::Tensor, Array, nil] what {Work#result} is of
      # @param value [Object] what is returned of an operation that is done
      def perform(operation, group, async_op, outputs, value = nil)
        return unless (group = member_group(group, operation))

        if (batch = Batch.of(group))
          batch.add(operation, outputs) { yield group, true, batch }
          return
        end

        result = yield group, async_op
        async_op ? result._writes(outputs) : value
      end

      def check_tensor(name, tensor)
        return if tensor.is_a?(Torch::Tensor)

        raise TypeError, "#{name}: expected a Torch::Tensor, got #{tensor.inspect} (#{tensor.class})"
      end

      # Yields memory in one piece for a tensor that is written: itself, which the extension checks, or, where that
      # answers that it is not contiguous, a copy that is copied back once the operation is done.
      def into(name, tensor)
        result = yield(tensor)
        return result unless :apart.equal?(result)

        apart?(name, tensor)
        memory = in_one_piece(tensor)
        finish(yield(memory)) { copy_back([[tensor, memory]]) }
      end

      # The same for a list. What is yielded is an Array of its own.
      def into_list(name, tensors)
        copies = []
        memories = tensors.each_with_index.map do |tensor, index|
          next tensor unless apart?(name, tensor, index)

          in_one_piece(tensor).tap { |memory| copies << [tensor, memory] }
        end
        result = yield memories
        copies.empty? ? result : finish(result) { copy_back(copies) }
      end

      # Memory in one piece of a tensor that is only read.
      def from(name, tensor)
        check_tensor(name, tensor)
        _memory_form(tensor) ? in_one_piece(tensor) : tensor
      end

      def from_list(tensors)
        tensors.map { |tensor| _memory_form(tensor) ? in_one_piece(tensor) : tensor }
      end

      # Tensors that are not strided are left to libtddp, which says why it does not take them.
      def apart?(name, tensor, index = nil)
        form = _memory_form(tensor)
        return !form.nil? unless form == :folded

        raise ArgumentError, "#{name}#{"[#{index}]" if index}: expected a tensor that can be written, but some of its elements " \
          "share their memory (shape #{tensor.shape}, strides #{tensor.stride}): pass a clone of it"
      end

      def in_one_piece(tensor)
        Torch.no_grad { tensor.contiguous }
      end

      def copy_back(pairs)
        Torch.no_grad { pairs.each { |tensor, memory| tensor.copy!(memory) } }
      end

      # Runs the block once the operation is done: now, or when its handle is waited for.
      def finish(result, &block)
        return result.finally(block) if result.is_a?(Work)

        block.call
        result
      end

      # What libtddp would say of these when their turn comes: for calls that are several operations.
      def check_memories(name, memories)
        memories.each_with_index { |memory, index| _check_memory("#{name}[#{index}]", memory) }
      end

      def check_tensors(name, list, same: true)
        unless list.is_a?(Array) && !list.empty?
          raise ArgumentError, "#{name}: expected an Array of tensors, got #{list.is_a?(Array) ? "an empty one" : list.inspect}"
        end

        list.each_with_index do |tensor, index|
          check_tensor("#{name}[#{index}]", tensor) unless tensor.is_a?(Torch::Tensor)
          next if !same || tensor.dtype == list.first.dtype

          raise ArgumentError, "#{name}[#{index}]: expected #{list.first.dtype}, as #{name}[0] is, got #{tensor.dtype}"
        end
      end

      # A list with a tensor for each rank, of one dtype; this rank's is shaped like `tensor`, the others' have the sizes
      # of theirs.
      def check_list(name, list, group, tensor_name, tensor)
        check_tensor(tensor_name, tensor)
        unless list.is_a?(Array) && list.size == group.size
          raise ArgumentError, "#{name}: expected an Array of #{group.size} tensors, one for each rank, got " +
            (list.is_a?(Array) ? "#{list.size} of them" : list.class.name)
        end

        dtype = tensor.dtype
        list.each_with_index do |each, index|
          check_tensor("#{name}[#{index}]", each) unless each.is_a?(Torch::Tensor)
          own = index == group.rank
          next if each.dtype == dtype && !(own && each.shape != tensor.shape)

          raise ArgumentError, "#{name}[#{index}]: expected #{dtype}#{" of shape #{tensor.shape}" if own} like #{tensor_name}, " \
            "got #{each.dtype} of shape #{each.shape}"
        end
      end

      # A list that only the root has.
      def check_root_list(name, list, group, root, tensor)
        return check_list(name, list, group, "tensor", tensor) if group.rank == root

        check_tensor("tensor", tensor)
        return if list.nil? || list == []

        raise ArgumentError, "#{name}: expected nil on rank #{group.rank}, since only rank #{root} of the group has one, got " +
          (list.is_a?(Array) ? "#{list.size} tensors" : list.inspect)
      end
    end
  end
end
