# frozen_string_literal: true

module Torch
  module Distributed
    # Operations with a piece for each rank, as lists of tensors or as one tensor. Pieces in lists may differ in
    # size: each has as many elements as the tensor at its other end. They are received where they belong,
    # without a copy.
    #
    # @see Collectives for what all operations have in common
    module Pieces
      # Gathers every rank's `tensor`, by rank: into a list, or where none is given into new tensors, which are returned.
      #
      #   mean = Torch.stack(Torch::Distributed.all_gather(loss)).mean
      #
      # @overload all_gather(tensor, group: nil, async_op: false)
      #   @param tensor [Torch::Tensor] of the same shape and dtype on every rank
      #   @return [Array<Torch::Tensor>, Work, nil] with `async_op` {Work#result} has them
      #   @raise [GroupError] within {Coalescing#coalescing_manager}, where they could not be returned
      # @overload all_gather(tensor_list, tensor, group: nil, async_op: false)
      #   @param tensor_list [Array<Torch::Tensor>] one for each rank, as large as that rank's `tensor`
      #   @param tensor [Torch::Tensor]
      #   @return [nil, Work]
      def all_gather(tensor_list, tensor = nil, group: nil, async_op: false)
        unless tensor || tensor_list.is_a?(Array)
          return unless (group = member_group(group, "all_gather"))

          tensor = tensor_list
          tensor_list = value = new_list("all_gather", tensor, group)
        end
        perform("all_gather", group, async_op, tensor_list, value) do |members, async|
          check_list("tensor_list", tensor_list, members, "tensor", tensor)
          input = from("tensor", tensor)
          into_list("tensor_list", tensor_list) { |memories| members._all_gather_list(memories, input, async) }
        end
      end

      # Gathers every rank's `input` into one tensor, end to end by rank.
      #
      # @param output [Torch::Tensor] world_size times as many elements as `input`
      # @param input [Torch::Tensor]
      # @return [nil, Work]
      def all_gather_into_tensor(output, input, group: nil, async_op: false)
        perform("all_gather_into_tensor", group, async_op, output) do |members, async|
          input = from("input", input)
          into("output", output) { |memory| members._all_gather(memory, input, async) }
        end
      end
      alias_method :all_gather_single, :all_gather_into_tensor

      # Gathers several tensors of every rank.
      #
      # @param output_tensor_lists [Array<Array<Torch::Tensor>>] for each rank a list like its `input_tensor_list`
      # @param input_tensor_list [Array<Torch::Tensor>]
      # @return [nil, Work]
      def all_gather_coalesced(output_tensor_lists, input_tensor_list, group: nil, async_op: false)
        outputs = output_tensor_lists.flatten if output_tensor_lists.is_a?(Array)
        perform("all_gather_coalesced", group, async_op, outputs) do |members, async|
          columns = check_columns(output_tensor_lists, input_tensor_list, members)
          inputs = from_list(input_tensor_list)
          check_memories("input_tensor_list", inputs)
          works = columns.zip(inputs).map do |column, input|
            into_list("output_tensor_lists", column) { |memories| members._all_gather_list(memories, input, true) }
          end
          work = CombinedWork.new(works)
          async ? work : work.wait
        end
      end

      # Gathers every rank's `tensor` on rank `dst`.
      #
      # @param tensor [Torch::Tensor]
      # @param gather_list [Array<Torch::Tensor>, nil] on rank `dst` one for each rank, or nil where all ranks' tensors are of one
      #   shape: new ones are returned then; elsewhere nil
      # @param dst [Integer, nil] the global rank of the process that gets them; 0 if nothing is given
      # @param group_dst [Integer, nil] instead of `dst`: its rank within the group
      # @return [Array<Torch::Tensor>, nil, Work] the new tensors by rank, nil where there are none; with `async_op` {Work#result} has them
      # @raise [GroupError] without a list within {Coalescing#coalescing_manager}
      def gather(tensor, gather_list = nil, dst: nil, group: nil, async_op: false, group_dst: nil)
        return unless (group = member_group(group, "gather"))

        root = rank_in_group(group, "dst", dst, group_dst, default: 0)
        gather_list = value = new_list("gather", tensor, group) if gather_list.nil? && group.rank == root
        perform("gather", group, async_op, gather_list, value) do |members, async|
          check_root_list("gather_list", gather_list, members, root, tensor)
          input = from("tensor", tensor)
          next members._gather(nil, input, root, async) unless members.rank == root

          into_list("gather_list", gather_list) { |memories| members._gather(memories, input, root, async) }
        end
      end

      # Gathers every rank's `input` on rank `dst` in one tensor, end to end by rank.
      #
      # @param output [Torch::Tensor, nil] on rank `dst` world_size times as many elements as `input`, elsewhere nil
      # @param input [Torch::Tensor] of the same size on every rank
      # @return [nil, Work]
      # @see #gather for the other arguments
      def gather_into_tensor(output, input, dst: nil, group: nil, async_op: false, group_dst: nil)
        perform("gather_into_tensor", group, async_op, output) do |members, async|
          root = rank_in_group(members, "dst", dst, group_dst, default: 0)
          input = from("input", input)
          next gather_nothing(output, input, root, members, async) unless members.rank == root

          check_tensor("output", output)
          counts = [input.numel] * members.size
          check_elements("output", output, counts)
          into("output", output) { |memory| members._gather_pieces(memory, counts, input, root, async) }
        end
      end
      alias_method :gather_single, :gather_into_tensor

      # Gives each rank its piece of what rank `src` has.
      #
      # @param tensor [Torch::Tensor] gets this rank's piece
      # @param scatter_list [Array<Torch::Tensor>, nil] on rank `src` one for each rank, elsewhere nil
      # @param src [Integer, nil] the global rank of the process that has them; 0 if nothing is given
      # @param group_src [Integer, nil] instead of `src`: its rank within the group
      # @return [nil, Work]
      def scatter(tensor, scatter_list = nil, src: nil, group: nil, async_op: false, group_src: nil)
        perform("scatter", group, async_op, tensor) do |members, async|
          root = rank_in_group(members, "src", src, group_src, default: 0)
          check_root_list("scatter_list", scatter_list, members, root, tensor)
          inputs = from_list(scatter_list) if members.rank == root
          into("tensor", tensor) { |memory| members._scatter(memory, inputs, root, async) }
        end
      end

      # Combines `input_list` over all ranks; rank r gets part r in `output`.
      #
      # @param output [Torch::Tensor]
      # @param input_list [Array<Torch::Tensor>] one for each rank, as large as that rank's `output`
      # @return [nil, Work]
      # @see Collectives#all_reduce for `op`
      def reduce_scatter(output, input_list, op: ReduceOp::SUM, group: nil, async_op: false)
        perform("reduce_scatter", group, async_op, output) do |members, async|
          check_list("input_list", input_list, members, "output", output)
          inputs = from_list(input_list)
          into("output", output) { |memory| members._reduce_scatter_list(memory, inputs, op, async) }
        end
      end

      # Combines `input` over all ranks; rank r gets its part r in `output`.
      #
      # @param output [Torch::Tensor]
      # @param input [Torch::Tensor] world_size times as many elements as `output`
      # @return [nil, Work]
      # @see Collectives#all_reduce for `op`
      def reduce_scatter_tensor(output, input, op: ReduceOp::SUM, group: nil, async_op: false)
        perform("reduce_scatter_tensor", group, async_op, output) do |members, async|
          input = from("input", input)
          into("output", output) { |memory| members._reduce_scatter(memory, input, op, async) }
        end
      end
      alias_method :reduce_scatter_single, :reduce_scatter_tensor

      # Sends `input_tensor_list[r]` to rank r, whose `output_tensor_list` has it at this rank's place.
      #
      # @param output_tensor_list [Array<Torch::Tensor>] one for each rank
      # @param input_tensor_list [Array<Torch::Tensor>] one for each rank
      # @return [nil, Work]
      def all_to_all(output_tensor_list, input_tensor_list, group: nil, async_op: false)
        perform("all_to_all", group, async_op, output_tensor_list) do |members, async|
          check_tensors("input_tensor_list", input_tensor_list)
          own = input_tensor_list[members.rank] || input_tensor_list.first
          check_list("input_tensor_list", input_tensor_list, members, "input_tensor_list[#{members.rank}]", own)
          check_list("output_tensor_list", output_tensor_list, members, "input_tensor_list[#{members.rank}]", own)
          inputs = from_list(input_tensor_list)
          into_list("output_tensor_list", output_tensor_list) { |memories| members._all_to_all(memories, inputs, async) }
        end
      end

      # Sends to each rank its part of `input` along dimension 0, and receives the others' parts in `output`.
      #
      # @param output [Torch::Tensor]
      # @param input [Torch::Tensor]
      # @param output_split_sizes [Array<Integer>, nil] how much of dimension 0 comes from each rank; nil: equally much
      # @param input_split_sizes [Array<Integer>, nil] how much goes to each rank; nil: equally much
      # @return [nil, Work]
      def all_to_all_single(output, input, output_splits = nil, input_splits = nil, output_split_sizes: output_splits,
        input_split_sizes: input_splits, group: nil, async_op: false)
        perform("all_to_all_single", group, async_op, output) do |members, async|
          gets = split_counts("output", output, output_split_sizes, members.size)
          gives = split_counts("input", input, input_split_sizes, members.size)
          input = from("input", input)
          into("output", output) { |memory| members._all_to_all_pieces(memory, gets, input, gives, async) }
        end
      end

      private

      # Tensors to gather into, where the caller gives none.
      def new_list(operation, tensor, group)
        check_tensor("tensor", tensor)
        if Batch.of(group)
          raise GroupError, "#{operation}: expected a list to gather into within coalescing_manager, where new tensors cannot be returned"
        end

        Array.new(group.size) { Torch.empty(tensor.shape, dtype: tensor.dtype, device: tensor.device) }
      end

      # The lists by input rather than by rank.
      def check_columns(lists, inputs, group)
        check_tensors("input_tensor_list", inputs, same: false)
        unless lists.is_a?(Array) && lists.size == group.size && lists.all? { |list| list.is_a?(Array) && list.size == inputs.size }
          raise ArgumentError, "output_tensor_lists: expected #{group.size} Arrays, one for each rank, each of #{inputs.size} tensors"
        end

        lists.transpose.each_with_index do |column, index|
          name = "output_tensor_lists[*][#{index}]"
          check_list(name, column, group, "input_tensor_list[#{index}]", inputs[index])
          column.each { |tensor| apart?(name, tensor) || _check_memory(name, tensor) }
        end
      end

      def gather_nothing(output, input, root, group, async)
        return group._gather(nil, input, root, async) if output.nil?

        raise ArgumentError, "output: expected nil on rank #{group.rank}, since only rank #{root} of the group gathers, " \
          "got #{output.class}"
      end

      def check_elements(name, tensor, counts)
        return if tensor.numel == counts.sum

        raise ArgumentError, "#{name}: expected #{counts.sum} elements, #{counts.size} times #{counts.first}, got " \
          "#{tensor.numel} (shape #{tensor.shape})"
      end

      # How many elements each rank's part has.
      def split_counts(name, tensor, sizes, world_size)
        check_tensor(name, tensor)
        raise ArgumentError, "#{name}: expected a tensor with a dimension to split, got one without" if tensor.dim.zero?

        length = tensor.size(0)
        row = tensor.shape.drop(1).inject(1, :*)
        return check_split_sizes(name, tensor, sizes, world_size).map { |size| size * row } if sizes && !sizes.empty?

        unless (length % world_size).zero?
          raise ArgumentError, "#{name}: expected dimension 0 to be a multiple of #{world_size}, got #{length}: give #{name}_split_sizes"
        end
        [length / world_size * row] * world_size
      end

      def check_split_sizes(name, tensor, sizes, world_size)
        unless sizes.is_a?(Array) && sizes.size == world_size && sizes.all? { |size| size.is_a?(Integer) && size >= 0 }
          raise ArgumentError, "#{name}_split_sizes: expected #{world_size} sizes, one for each rank, got #{sizes.inspect}"
        end
        return sizes if sizes.sum == tensor.size(0)

        raise ArgumentError, "#{name}_split_sizes: expected a sum of #{tensor.size(0)}, which is dimension 0 of #{name}, got " \
          "#{sizes.inspect}, together #{sizes.sum}"
      end
    end
  end
end
