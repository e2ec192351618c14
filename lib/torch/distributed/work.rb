# frozen_string_literal: true

module Torch
  module Distributed
    # A handle on one operation that was started with `async_op: true`.
    #
    # @!method completed?
    #   @return [Boolean] whether it is done, well or not
    # @!method success?
    #   @return [Boolean] whether it is done and went well
    # @!method exception
    #   @return [Error, nil] what stopped it
    # @!method operation
    #   @return [Symbol] :all_reduce and so on
    # @!method sequence
    #   @return [Integer] its number in its group, the same on every rank
    class Work
      # Waits until the operation is done. Only then may its tensors be read or changed. Other threads run
      # meanwhile; an interrupt ends the wait, not the operation.
      #
      # @param timeout [Numeric, nil] seconds of this wait; nil: as long as the operation's group allows
      # @return [true]
      # @raise [Error] what stopped the operation; {TimeoutError} also when only this wait is over
      def wait(timeout = nil)
        _wait(timeout)
        steps, @steps = @steps, nil
        steps&.each(&:call)
        true
      end

      def inspect
        "#<#{self.class.name} #{operation} #{sequence} #{completed? ? "done" : "running"}>"
      end

      # @api private
      # @param step [Proc] called once, by the {#wait} that sees the operation done, after those given before
      def finally(step)
        (@steps ||= []) << step
        self
      end
    end
  end
end
