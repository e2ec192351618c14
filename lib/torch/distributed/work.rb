# frozen_string_literal: true

module Torch
  module Distributed
    # A handle on one operation that was started with `async_op: true`. Several may be under way, and be waited for
    # in any order; one that the program forgets goes on all the same.
    #
    #   work = Torch::Distributed.all_reduce(gradient, async_op: true)
    #   compute_something_else
    #   work.wait
    #   gradient                                   # the sum
    #
    # @!method completed?
    #   Asks only, also for an operation on a GPU's memory: nothing waits.
    #   @return [Boolean] whether it is done, well or not
    # @!method success?
    #   @return [Boolean] whether it is done and went well
    # @!method exception
    #   @return [Error, nil] what stopped it; nil also while it is under way
    # @!method operation
    #   @return [Symbol] :all_reduce, :broadcast and so on
    # @!method sequence
    #   @return [Integer] its number in its group, the same on every rank; sends and receives have numbers of their own
    class Work
      # Waits until the operation is done. Only then may its tensors be read or changed. Other threads run
      # meanwhile; an interrupt ends the wait, not the operation.
      #
      # Of an operation on a GPU's memory without a `timeout`, as in PyTorch: what this thread has the GPU do from now on
      # comes after the operation, and the program goes on at once. What stops the operation later is raised by the
      # group's next one. TORCH_NCCL_BLOCKING_WAIT=1 has the program wait.
      #
      # @param timeout [Numeric, nil] seconds of this wait; nil: as long as the operation's group allows
      # @return [true]
      # @raise [Error] what stopped the operation; {TimeoutError} also when only this wait is over
      def wait(limit = nil, timeout: limit)
        _wait(timeout)
        conclude if @steps
        true
      end

      # Puts the operation before what this thread has the GPU do from now on, on its current stream; the host never waits for a
      # GPU's operation here, whatever TORCH_NCCL_BLOCKING_WAIT says. Of an operation on the CPU's memory the same as {#wait}
      # without a timeout.
      #
      # @return [nil]
      # @raise [Error] what stopped the operation, if that is known
      def synchronize
        _synchronize
        conclude if @steps
        nil
      end

      # @return [Array<Torch::Tensor>] the tensors that the operation writes on this rank; {#wait} or {#synchronize} first
      def result
        @outputs.is_a?(Array) ? @outputs.flatten : [@outputs].compact
      end

      # @return [Integer, nil] the global rank of the process whose message was received
      def source_rank
        source = _source
        (source && @ranks) ? @ranks[source] : source
      end

      # @return [String]
      def inspect
        "#<#{self.class.name} #{operation} #{sequence} #{completed? ? "done" : "running"}>"
      end

      # @api private
      # @param step [Proc] called once, by the {#wait} that sees the operation done, after those given before
      def finally(step)
        @lock ||= Mutex.new
        (@steps ||= []) << step
        self
      end

      # @api private
      # @param outputs [Torch::Tensor, Array, nil]
      def _writes(outputs)
        @outputs = outputs unless outputs.nil?
        self
      end

      # @api private
      # @param ranks [Array<Integer>] the global ranks of the group
      def _among(ranks)
        @ranks = ranks
        self
      end

      private

      # A second caller waits until the first is done.
      def conclude
        @lock.synchronize do
          @steps.shift.call until @steps.empty?
        end
      end
    end

    # A handle on several operations at once: of {Coalescing#coalescing_manager} for instance.
    class CombinedWork < Work
      # @return [Array<Work>]
      attr_reader :works

      # @api private
      def initialize(works)
        super()
        @works = works.freeze
      end

      # Waits until all of them are done.
      #
      # @return [true]
      # @see Work#wait
      def wait(limit = nil, timeout: limit)
        deadline = now + timeout if timeout
        @works.each { |work| work.wait(deadline && [deadline - now, 0].max) }
        conclude if @steps
        true
      end

      # @return [nil]
      # @see Work#synchronize
      def synchronize
        @works.each(&:synchronize)
        conclude if @steps
        nil
      end

      def completed?
        @works.all?(&:completed?)
      end

      def success?
        @works.all?(&:success?)
      end

      # @return [Error, nil] what stopped the first that was stopped
      def exception
        @works.each { |work| (error = work.exception) && (return error) }
        nil
      end

      # @return [Symbol] :coalesced
      def operation
        :coalesced
      end

      # @return [Integer, nil] that of the first
      def sequence
        @works.first&.sequence
      end

      # @return [Array<Torch::Tensor>] the tensors that the operations write on this rank; {#wait} first
      def result
        @outputs ? super : @works.flat_map(&:result)
      end

      # @return [nil] there may be several
      def source_rank
        nil
      end

      # @return [String]
      def inspect
        "#<#{self.class.name} of #{@works.size}, #{completed? ? "done" : "running"}>"
      end

      private

      def now
        Process.clock_gettime(Process::CLOCK_MONOTONIC)
      end
    end
  end
end
