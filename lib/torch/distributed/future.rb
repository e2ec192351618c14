# frozen_string_literal: true

require "monitor"

module Torch
  module Distributed
    # The value of an operation, once it is done, and callbacks on it: what communication hooks return.
    #
    #   work = Torch::Distributed.all_reduce(bucket.buffer, async_op: true)
    #   work.get_future.then { |future| future.value.first / world_size }
    #
    # A block given to {#then} is run by the {#wait} that needs it, on the thread that waits.
    class Future
      class << self
        # @param value [Object]
        # @return [Future] one that has its value
        def of(value)
          new(nil) { value }.tap(&:wait)
        end
      end

      # @api private
      # @param source [Work, Future, nil] what is waited for first
      # @yieldreturn [Object] the value
      def initialize(source, &block)
        @source = source
        @block = block
        @lock = Monitor.new
        @done = false
      end

      # Goes on with the value once it is there.
      #
      # @yieldparam future [Future] this one, which is done
      # @yieldreturn [Object] the new future's value; a Future or a Work stands for its own
      # @return [Future]
      def then(&block)
        raise ArgumentError, "Future#then: expected a block" unless block

        Future.new(self) { block.call(self) }
      end

      # Waits until the value is there.
      #
      # @return [Object] the value
      # @raise [Error] what stopped the operation, or whatever a block raised: each time it is waited for
      def wait
        @lock.synchronize do
          conclude unless @done
          raise @error if @error

          @value
        end
      end

      # @return [Object] the same as {#wait}
      def value
        wait
      end

      # @return [Boolean] whether {#wait} has been through; a work's future also once the work is done
      def done?
        @done || (@source.is_a?(Work) && @source.completed?)
      end

      # @return [String]
      def inspect
        "#<#{self.class.name} #{done? ? "done" : "running"}>"
      end

      private

      # A wait for the source may be repeated; the block runs once.
      def conclude
        @source&.wait
        begin
          @value = settle(@block.call)
        rescue => e
          @error = e
        end
        @done = true
      end

      def settle(value)
        case value
        when Future then value.wait
        when Work then value.get_future.wait
        else value
        end
      end
    end

    class Work
      # @return [Future] of {#result}: the tensors that the operation writes
      def get_future
        Future.new(self) { result }
      end
    end
  end
end
