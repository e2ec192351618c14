# frozen_string_literal: true

module Torch
  module Distributed
    # Tensors that a group's operations work on where they lie.
    module SharedTensors
      MOST_ELEMENTS = 2**63 - 1
      private_constant :MOST_ELEMENTS

      # A tensor in memory that the ranks of this host share: operations of `group` on it, or on parts of it in one piece,
      # read and write it in place, where other tensors are copied through. It pays for large ones that are
      # reduced again and again, such as flat parameters; gradients of {Torch::NN::Parallel::DistributedDataParallel} lie in such
      # memory anyway. What is computed does not change, and ranks may differ in whether theirs is one.
      #
      #   flat = Torch::Distributed.empty_shared(1024, 1024)
      #   flat.copy!(gradients)
      #   Torch::Distributed.all_reduce(flat, op: :avg)
      #
      # Unlike with `Torch.empty` its elements are zero at first. Each rank calls it for itself, and no other rank sees its
      # elements other than by operations. Any group's operations take it, only those of `group` without copies.
      # It may be kept when the group is destroyed, and its memory goes back when the last tensor on it is
      # collected. A forked child has a copy, as of the fork. Where ranks share no memory it is a tensor like others.
      #
      # @param size [Array<Integer>] as with `Torch.empty`: `empty_shared(2, 3)` or `empty_shared([2, 3])`
      # @param dtype [Symbol, nil] nil: that of `Torch.empty`
      # @param group [ProcessGroup, nil] nil: the default group
      # @param device [String, Symbol, Torch::Device, nil] for PyTorch's sake: the CPU, where such memory is
      # @return [Torch::Tensor]
      # @raise [GroupError] if there is no group, or this process is not in it
      # @raise [ArgumentError] for a size or dtype that tensors cannot have, another device, or a group of nccl
      # @raise [Error] if memory is short
      def empty_shared(*size, dtype: nil, group: nil, device: nil)
        sizes = shared_sizes(size)
        dtype = shared_dtype(dtype)
        unless device.nil? || device_type(device) == "cpu"
          raise ArgumentError, "device: expected the CPU, whose memory ranks share, got #{device.inspect}"
        end
        if GroupMember::NON_GROUP_MEMBER.equal?(group)
          raise GroupError, "empty_shared: this process is not in the group, whose operations the tensor would be for"
        end

        members = group_or_default(group)
        if members.backend == "nccl"
          raise ArgumentError, "group: expected one for tensors in the CPU's memory, but nccl works on those of GPUs"
        end

        members._empty_shared(sizes, dtype)
      end

      private

      def shared_sizes(size)
        raise ArgumentError, "size: expected Integers, got nothing: a tensor of one element without dimensions is empty_shared([])" if size.empty?

        size.flatten.each_with_index do |each, index|
          raise TypeError, "size[#{index}]: expected an Integer, got #{each.inspect}" unless each.is_a?(Integer)
          next if each.between?(0, MOST_ELEMENTS)

          raise ArgumentError, "size[#{index}]: expected 0 to 2**63 - 1 elements, got #{each}"
        end
      end

      def shared_dtype(dtype)
        return Torch.empty(0).dtype if dtype.nil?

        number = Torch::DTYPE_TO_ENUM[dtype.respond_to?(:to_sym) ? dtype.to_sym : dtype]
        raise ArgumentError, "dtype: expected one of torch-rb's, such as :float32, got #{dtype.inspect}" unless number

        Torch::ENUM_TO_DTYPE.fetch(number)
      end
    end
  end
end
