# frozen_string_literal: true

require "torch"

module Torch
  module Utils
    module Data
      # Every n-th index of an order, as one process gets them: places behind the end begin at the front again. A shuffled order is a tensor
      # until its indices are asked for, so that an epoch of millions begins at once.
      #
      # @api private
      class IndexShare
        # How many indices are numbers of Ruby's at a time.
        CHUNK = 1 << 14
        private_constant :CHUNK

        # @return [Integer]
        attr_reader :size

        # @param order [Torch::Tensor, Integer] of int64, or how many indices there are, in their own order
        # @param first [Integer] the first place
        # @param step [Integer] from place to place
        # @param size [Integer] how many
        def initialize(order, first, step, size)
          @first = first
          @step = step
          @size = size
          @count = order.is_a?(Integer) ? order : order.numel
          select(order) unless order.is_a?(Integer)
        end

        # @yieldparam index [Integer]
        def each(&block)
          0.step(@size - 1, CHUNK) { |at| slice(at, [CHUNK, @size - at].min).each(&block) }
        end

        # @param count [Integer]
        # @yieldparam indices [Array<Integer>] so many, the last ones fewer
        def each_slice(count, &block)
          several = [CHUNK / count, 1].max * count
          0.step(@size - 1, several) { |at| slice(at, [several, @size - at].min).each_slice(count, &block) }
        end

        private

        def slice(at, count)
          return selected(at, count) if @rest

          place = @first + at * @step
          Array.new(count) { |i| (place + i * @step) % @count }
        end

        # Only this part of the order stays: all but the last of a row of `step` each as a tensor, the others as numbers.
        def select(order)
          rows = (@first < @count) ? [(@count - @first) / @step, @size].min : 0
          @column = order.narrow(0, @first, rows * @step).view(rows, @step).select(1, 0).contiguous if rows.positive?
          @rest = (rows...@size).map { |i| order[(@first + i * @step) % @count].item }
        end

        def selected(at, count)
          rows = @size - @rest.size
          from = (rows - at).clamp(0, count)
          indices = from.zero? ? [] : Torch::Distributed.send(:_bytes, @column.narrow(0, at, from)).unpack("q*")
          (from == count) ? indices : indices.concat(@rest[[at - rows, 0].max, count - from])
        end
      end
      private_constant :IndexShare
    end
  end
end
