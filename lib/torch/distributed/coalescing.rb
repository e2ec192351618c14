# frozen_string_literal: true

module Torch
  module Distributed
    # Combines several operations into one.
    module Coalescing
      # Operations on `group` that the block calls on this thread become parts of one: they return nil at once, and
      # are done when this returns. All-reduces of the same kind and dtype that follow each other are carried out
      # together, which saves their latencies, and so are messages, as by {PointToPoint#batch_isend_irecv}. Results, such as the sender of {PointToPoint#recv}, and operations that
      # need them (those on objects) have no place in the block. Which all-reduces go together depends on whether their
      # tensors are contiguous and share memory: that must be the same on all ranks.
      #
      #   Torch::Distributed.coalescing_manager do
      #     gradients.each { |gradient| Torch::Distributed.all_reduce(gradient, op: :avg) }
      #   end
      #
      # @param group [ProcessGroup, nil] nil: the default group
      # @param device [Object] for PyTorch's sake; a group has one device
      # @param async_ops [Boolean] whether to return a handle on them instead of waiting
      # @return [nil, CombinedWork]
      # @raise [GroupError] within another block of this thread for this group
      def coalescing_manager(group: nil, device: nil, async_ops: false, &block)
        raise ArgumentError, "coalescing_manager: expected a block with operations" unless block

        if GroupMember::NON_GROUP_MEMBER.equal?(group)
          yield
          return
        end

        work = Batch.collect(group_or_default(group), self, &block)
        return work if async_ops

        work.wait
        nil
      end

      # @api private
      # @return [CombinedWork, nil] all-reduces of one kind
      def _reduce_together(tensors, op, group)
        into_list("tensor", tensors) { |memories| group._all_reduce_coalesced(memories, op, true) }
      end
    end

    # The operations of one {Coalescing#coalescing_manager}.
    #
    # @api private
    class Batch
      KEY = :torch_distributed_batches
      private_constant :KEY

      class << self
        # @return [Batch, nil] the one that operations on this group belong to, on this thread
        def of(group)
          batches = Thread.current[KEY] if @used
          batches && batches[group]
        end

        # @yield calls operations
        # @return [CombinedWork] theirs
        def collect(group, distributed)
          @used = true # before, no thread has any
          batches = Thread.current[KEY] ||= {}.compare_by_identity
          if batches.key?(group)
            raise GroupError, "coalescing_manager: expected to be called outside of its own block, but this thread is in one for #{group.inspect}"
          end

          batch = batches[group] = new(group, distributed)
          begin
            yield
          ensure
            batches.delete(group)
            Thread.current[KEY] = nil if batches.empty?
          end
          batch.close
        end
      end

      def initialize(group, distributed)
        @group = group
        @distributed = distributed
        @works = []
        @waiting = []
        @spans = []
        @messages = []
      end

      # Runs the block, which starts an operation or leaves it to {#reduce}. Those that waited go first, so that the
      # order is that of the calls.
      def add(operation, outputs)
        settle if @copied
        launch unless operation == "all_reduce" && @messages.empty?
        work = yield
        post(work._writes(outputs)) if work
      end

      # @return [Work] the same
      def post(work)
        @works << work
        work
      end

      # Leaves an all-reduce for later, to be carried out with those like it that come next.
      # @return [nil]
      def reduce(tensor, op)
        @distributed._check_operand("tensor", tensor)
        kind = [ReduceOp.resolve(op), tensor.dtype, @distributed._device_name(tensor.device)]
        span = @distributed._span(tensor)
        settle if span.nil? || @copied
        begin_messages
        launch unless @kind == kind && @spans.all? { |other| apart?(other, span) }
        @copied = span.nil?
        @kind = kind
        @op = op
        @waiting << tensor
        @spans << span
        nil
      end

      # Leaves a message for later, to begin with those that come next.
      # @return [nil]
      def message(message)
        settle if @copied
        launch unless @waiting.empty?
        @messages << message
        nil
      end

      # @return [CombinedWork]
      def close
        launch
        CombinedWork.new(@works)
      end

      private

      # Whether two pieces of memory share nothing.
      def apart?(one, other)
        one.sum <= other.first || other.sum <= one.first
      end

      # A tensor that is not contiguous is copied when its operation starts and again when it is waited for, and of its
      # memory nothing is known: what may share it has to be done before, or to come after.
      def settle
        launch
        @works.each(&:wait)
        @copied = false
      end

      def begin_messages
        messages, @messages = @messages, []
        @works.concat(@distributed._begin_together(messages, @group)) unless messages.empty?
      end

      def launch
        begin_messages
        tensors, @waiting = @waiting, []
        @spans = []
        return if tensors.empty?

        post(@distributed._reduce_together(tensors, @op, @group)._writes(tensors))
      end
    end
    private_constant :Batch
  end
end
