# frozen_string_literal: true

module Torch
  module Distributed
    # Collectives with a gradient, as PyTorch's torch.distributed.nn.functional has them: each returns new tensors, whose
    # backward is a collective as well, and leaves what it reads as it is. Where there is an argument for the output, that
    # gets the values too, but only what is returned has the gradient.
    #
    #   parts = Torch::Distributed::NN.all_gather(features)
    #   loss(Torch.cat(parts)).backward
    #
    # Every rank calls the same functions in the same order, and its loss depends on the results of all of them, or of
    # none: backward runs on every rank then, and it is the gradient of the sum of all ranks' losses. So where every rank
    # computes the same loss from a result, gradients are that many times those of one; {copy_to_region} and its kin are
    # for such models.
    #
    # In a process that is not in the group nothing is done, and nil returned.
    module NN
      module_function

      # The sum or mean over all ranks.
      #
      # @param tensor [Torch::Tensor] of the same shape and dtype on every rank
      # @param op [Integer, Symbol, String] ReduceOp::SUM or AVG: others have no such gradient
      # @param group [ProcessGroup, nil] nil: the default group
      # @return [Torch::Tensor]
      def all_reduce(tensor, op: ReduceOp::SUM, group: nil)
        within("all_reduce", group) { |members| members.apply(tensor, :all_reduce, :all_reduce, op: op) }
      end

      # The sum or mean over all ranks, at rank `dst`; elsewhere zeros.
      #
      # @param dst [Integer] the global rank that gets it
      # @see .all_reduce for the other arguments
      # @return [Torch::Tensor]
      def reduce(tensor, dst: 0, op: ReduceOp::SUM, group: nil)
        within("reduce", group) do |members|
          members.apply(tensor, :reduce, :broadcast, op: op, root: members.root("dst", dst))
        end
      end

      # The tensor of rank `src`. The gradient is summed there, and zero elsewhere.
      #
      # @param tensor [Torch::Tensor] of the same shape and dtype on every rank
      # @param src [Integer] the global rank that has the values
      # @return [Torch::Tensor]
      def broadcast(tensor, src: 0, group: nil)
        within("broadcast", group) { |members| members.apply(tensor, :broadcast, :reduce, root: members.root("src", src)) }
      end

      # The tensors of all ranks, by rank.
      #
      # @param tensor [Torch::Tensor] of the same shape and dtype on every rank
      # @return [Array<Torch::Tensor>]
      def all_gather(tensor, group: nil)
        within("all_gather", group) do |members|
          members.parts(members.apply(members.row(tensor), :all_gather, :reduce_scatter))
        end
      end

      # The tensors of all ranks at rank `dst`, by rank; elsewhere zeros.
      #
      # @return [Array<Torch::Tensor>]
      # @see .all_gather
      def gather(tensor, dst: 0, group: nil)
        within("gather", group) do |members|
          members.parts(members.apply(members.row(tensor), :gather, :scatter, root: members.root("dst", dst)))
        end
      end

      # The tensor with this rank's number in the list of rank `src`.
      #
      # @param tensors [Array<Torch::Tensor>] one for each rank, of one shape; elsewhere than at `src` only their shape counts
      # @return [Torch::Tensor]
      def scatter(tensors, src: 0, group: nil)
        within("scatter", group) do |members|
          members.apply(members.rows("tensors", tensors), :scatter, :gather, root: members.root("src", src))[0]
        end
      end

      # The sum or mean over all ranks of the tensors with this rank's number.
      #
      # @param output [Torch::Tensor] of the shape of each
      # @param input_list [Array<Torch::Tensor>] one for each rank, of one shape
      # @see .all_reduce for the other arguments
      # @return [Torch::Tensor]
      def reduce_scatter(output, input_list, op: ReduceOp::SUM, group: nil)
        within("reduce_scatter", group) do |members|
          list = members.rows("input_list", input_list)
          members.check_shape("output", output, input_list.first.shape)
          members.fill(output, members.apply(list, :reduce_scatter, :all_gather, op: op)[0])
        end
      end

      # A tensor to each rank, and from it.
      #
      # @param output_tensor_list [Array<Torch::Tensor>] one for each rank, with as many elements as it sends
      # @param input_tensor_list [Array<Torch::Tensor>] one for each rank; sizes may differ
      # @return [Array<Torch::Tensor>]
      def all_to_all(output_tensor_list, input_tensor_list, group: nil)
        within("all_to_all", group) do |members|
          sends = members.sizes("input_tensor_list", input_tensor_list)
          receives = members.sizes("output_tensor_list", output_tensor_list)
          flat = Torch.cat(input_tensor_list.map { |tensor| tensor.reshape(-1) })
          all = members.apply(flat, :all_to_all, :all_to_all, sends: sends, receives: receives)
          begins = receives.each_with_index.map { |_, i| receives.first(i).sum }
          output_tensor_list.each_with_index.map do |output, i|
            members.fill(output, all.narrow(0, begins[i], receives[i]).reshape(output.shape))
          end
        end
      end

      # Rows to each rank, and from it: the first dimension is cut, and what comes is put together by rank.
      #
      # @param output [Torch::Tensor] with as many rows as come
      # @param input [Torch::Tensor]
      # @param output_split_sizes [Array<Integer>, nil] how many rows come from each rank; nil: equal parts
      # @param input_split_sizes [Array<Integer>, nil] how many go to each; nil: equal parts
      # @return [Torch::Tensor]
      def all_to_all_single(output, input, output_split_sizes: nil, input_split_sizes: nil, group: nil)
        within("all_to_all_single", group) do |members|
          receives = members.split("output", output, output_split_sizes)
          sends = members.split("input", input, input_split_sizes)
          members.fill(output, members.apply(input, :all_to_all, :all_to_all, sends: sends, receives: receives))
        end
      end

      # --- regions of a model whose ranks compute the same outside of it ---

      # Into a region where each rank computes its part, of a tensor that all of them have: the same tensor. Its gradient
      # is the sum of all ranks'.
      #
      # @param tensor [Torch::Tensor] the same on every rank
      # @return [Torch::Tensor]
      def copy_to_region(tensor, group: nil)
        within("copy_to_region", group) { |members| members.apply(tensor, :identity, :all_reduce) }
      end

      # Out of it, of a tensor of which each rank has a summand: the sum. Its gradient is each summand's.
      #
      # @return [Torch::Tensor] the same on every rank
      def reduce_from_region(tensor, group: nil)
        within("reduce_from_region", group) { |members| members.apply(tensor, :all_reduce, :identity) }
      end

      # Into it: this rank's part of a tensor that all of them have. Its gradient is put together from all ranks'.
      #
      # @param tensor [Torch::Tensor] the same on every rank
      # @param dim [Integer] the dimension that is divided, by the number of ranks
      # @return [Torch::Tensor]
      def scatter_to_region(tensor, dim: -1, group: nil)
        within("scatter_to_region", group) { |members| members.along(tensor, dim, :slice, :all_gather) }
      end

      # Out of it: all ranks' parts put together. The gradient of a rank's part is its part of the gradient.
      #
      # @return [Torch::Tensor] the same on every rank
      # @see .scatter_to_region for the arguments
      def gather_from_region(tensor, dim: -1, group: nil)
        within("gather_from_region", group) { |members| members.along(tensor, dim, :all_gather, :slice) }
      end

      # Into a region where each rank computes its part, of a tensor that is divided: all ranks' parts put together. The gradient
      # of a rank's part is its part of the sum of all ranks'.
      #
      # @return [Torch::Tensor] the same on every rank
      # @see .scatter_to_region for the arguments
      def gather_to_region(tensor, dim: 0, group: nil)
        within("gather_to_region", group) { |members| members.along(tensor, dim, :all_gather, :reduce_scatter) }
      end

      # Out of it, of a tensor of which each rank has a summand: this rank's part of the sum, into a region that is divided.
      # The gradient is put together from all ranks'.
      #
      # @return [Torch::Tensor]
      # @see .scatter_to_region for the arguments
      def reduce_scatter_to_region(tensor, dim: 0, group: nil)
        within("reduce_scatter_to_region", group) { |members| members.along(tensor, dim, :reduce_scatter, :all_gather) }
      end

      # --- linear layers that are divided over such a region ---

      # What Torch::NN::Functional.linear computes, and its gradients, with the same bits. Within {WeightGradients.defer} its
      # backward leaves the gradients of the weight and the bias for later.
      #
      # @param input [Torch::Tensor] floating-point, of shape [..., in]
      # @param weight [Torch::Tensor] [out, in]
      # @param bias [Torch::Tensor, nil] [out]
      # @return [Torch::Tensor] [..., out]
      def linear(input, weight, bias = nil)
        Distributed.send(:_linear, input, weight, bias, nil, nil, nil)
      end

      # A linear layer whose weight is divided by its rows: each rank computes its part of the result's features. The
      # input's gradient is summed over the ranks while those of the weight and the bias are computed; for an input that
      # requires none nothing is sent.
      #
      # With a `sequence_dim` each rank has a part of the input along that dimension, of the same size. They are put
      # together first, and kept for backward, which leaves each rank its part of the input's gradient. The result has the
      # strides of a transposed tensor then, unless that dimension is the first.
      #
      # @param input [Torch::Tensor] floating-point, of shape [..., in], the same on every rank; with a `sequence_dim` a part
      # @param weight [Torch::Tensor] this rank's part, [out / ranks, in]
      # @param bias [Torch::Tensor, nil] this rank's part, [out / ranks]
      # @param sequence_dim [Integer, nil] a dimension of the input before its last one
      # @param group [ProcessGroup, nil] nil: the default group. Of one rank: {.linear}
      # @raise [ArgumentError] shapes or dtypes that do not fit together
      # @return [Torch::Tensor] [..., out / ranks]
      def column_linear(input, weight, bias = nil, sequence_dim: nil, group: nil)
        within("column_linear", group) { |members| members.linear(:column, input, weight, bias, sequence_dim) }
      end

      # A linear layer whose weight is divided by its columns: each rank computes a summand of the result, from its part of
      # the input's features, as {.column_linear} leaves it. The bias is added once, to the sum.
      #
      # With a `sequence_dim` each rank gets its part of the sum along that dimension. Backward puts the parts of the
      # result's gradient together, so that gradients of the bias too are those of the complete result.
      #
      # @param input [Torch::Tensor] floating-point, of shape [..., in / ranks]: this rank's part
      # @param weight [Torch::Tensor] this rank's part, [out, in / ranks]
      # @param bias [Torch::Tensor, nil] [out], the same on every rank
      # @param sequence_dim [Integer, nil] a dimension of the input before its last one, that the number of ranks divides
      # @raise [ArgumentError] also if it does not
      # @return [Torch::Tensor] [..., out], the same on every rank; with a `sequence_dim` a part
      # @see .column_linear for the other arguments
      def row_linear(input, weight, bias = nil, sequence_dim: nil, group: nil)
        within("row_linear", group) { |members| members.linear(:row, input, weight, bias, sequence_dim) }
      end

      # @api private
      def within(operation, group)
        found = Distributed.send(:member_group, group, operation)
        found && yield(Members.new(found, operation))
      end
      private_class_method :within

      # A group, as these functions use it.
      #
      # @api private
      class Members
        def initialize(group, operation)
          @group = group
          @operation = operation
        end

        # @param map [Symbol] what <tddp/torch_collectives.h> calls so
        # @param gradient [Symbol] that of its gradient
        def apply(tensor, map, gradient, op: ReduceOp::SUM, root: 0, sends: nil, receives: nil)
          Distributed.send(:check_tensor, "tensor", tensor)
          Distributed.send(:_collective, tensor, @group, map, gradient, root, scale(op), sends, receives)
        end

        # @param form [Symbol] :column or :row
        def linear(form, input, weight, bias, sequence_dim)
          Distributed.send(:check_tensor, "input", input)
          sequence_dim = dimension("sequence_dim", sequence_dim, input) if sequence_dim
          Distributed.send(:_linear, input, weight, bias, @group, form, sequence_dim)
        end

        # The same, for parts of another dimension than the first.
        def along(tensor, dim, map, gradient)
          Distributed.send(:check_tensor, "tensor", tensor)
          dim = dimension("dim", dim, tensor)
          return apply(tensor, map, gradient) if dim.zero?

          apply(tensor.transpose(0, dim), map, gradient).transpose(0, dim)
        end

        def root(name, rank)
          Distributed.send(:rank_in_group, @group, name, rank, nil)
        end

        # As the only row of another tensor.
        def row(tensor)
          Distributed.send(:check_tensor, "tensor", tensor)
          tensor.unsqueeze(0)
        end

        def rows(name, tensors)
          Distributed.send(:check_tensors, name, tensors)
          unless tensors.size == @group.size && tensors.map(&:shape).uniq.size == 1
            raise ArgumentError, "#{name}: expected #{@group.size} tensors of one shape, one for each rank, got shapes " +
              tensors.map { |tensor| tensor.shape.inspect }.join(", ")
          end

          Torch.stack(tensors)
        end

        def parts(tensor)
          Array.new(@group.size) { |rank| tensor[rank] }
        end

        def sizes(name, tensors)
          Distributed.send(:check_tensors, name, tensors)
          raise ArgumentError, "#{name}: expected #{@group.size} tensors, one for each rank, got #{tensors.size}" unless tensors.size == @group.size

          tensors.map(&:numel)
        end

        # How many rows of the tensor are each rank's.
        def split(name, tensor, sizes)
          Distributed.send(:check_tensor, name, tensor)
          rows = tensor.shape.first || raise(ArgumentError, "#{name}: a tensor without dimensions has no rows")
          unless sizes
            return Array.new(@group.size, rows / @group.size) if (rows % @group.size).zero?

            raise ArgumentError, "#{name}: expected rows that #{@group.size} ranks can share, got #{rows}: pass #{name}_split_sizes:"
          end
          return sizes if sizes.is_a?(Array) && sizes.size == @group.size && sizes.sum == rows && sizes.all? { |size| size >= 0 }

          raise ArgumentError, "#{name}_split_sizes: expected #{@group.size} numbers that add up to #{rows}, got #{sizes.inspect}"
        end

        def check_shape(name, tensor, shape)
          Distributed.send(:check_tensor, name, tensor)
          return if tensor.shape == shape

          raise ArgumentError, "#{name}: expected a tensor of shape #{shape}, got #{tensor.shape}"
        end

        # @return [Torch::Tensor] the result
        def fill(output, result)
          Torch.no_grad { output.copy!(result) }
          result
        end

        private

        # The same dimension, counted from the first.
        def dimension(name, dim, tensor)
          unless dim.is_a?(Integer) && dim.between?(-tensor.dim, tensor.dim - 1)
            raise ArgumentError, "#{name}: #{dim.inspect}: expected a dimension of a tensor of shape #{tensor.shape}"
          end

          dim.negative? ? dim + tensor.dim : dim
        end

        def scale(op)
          case ReduceOp.resolve(op).first
          when ReduceOp::SUM then 1.0
          when ReduceOp::AVG then 1.0 / @group.size
          else raise ArgumentError, "#{@operation}: op: #{op.inspect}: expected SUM or AVG, which have a gradient"
          end
        end
      end
      private_constant :Members
    end
  end
end
