# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # Elements of a tensor that is laid out flat: `count` of them from `start` on. With a stride they are rows of `width` elements
      # that begin `stride` apart, at least two.
      #
      # @api private
      Region = Struct.new(:start, :count, :width, :stride) do
        # A range of the elements that a process holds, who has `width` of every `stride` from `offset` on.
        #
        # @param first [Integer] the range's first among them
        # @return [Array<Region>] in this order a part of a row, rows, and a part of a row, as far as there are such
        def self.cut(offset, width, stride, first, count)
          return [] if count.zero?
          return [new(offset + first, count)] if width == stride

          row, at = first.divmod(width)
          head = at.zero? ? 0 : [width - at, count].min
          rows, tail = (count - head).divmod(width)
          below = row + (head.zero? ? 0 : 1)
          [[row, at, head], [below, 0, rows * width], [below + rows, 0, tail]].reject { |_, _, size| size.zero? }
            .map { |line, column, size| new(offset + line * stride + column, size, *([width, stride] if size > width)) }
        end

        # The first element that none of the regions has.
        #
        # @param regions [Array<Region>]
        # @param total [Integer] elements of the tensor
        # @return [Integer, nil]
        def self.gap(regions, total)
          return if total.zero?

          stride = regions.filter_map(&:stride).first || total
          boxes = regions.flat_map { |region| region.boxes(stride) }.sort_by(&:first)
          open = []
          row = 0
          while row < total / stride
            open << boxes.shift while boxes.any? && boxes[0][0] <= row
            open.reject! { |_, below| below <= row }
            reached = open.sort_by { |box| box[2] }.inject(0) { |at, (_, _, left, right)| (left > at) ? at : [at, right].max }
            return row * stride + reached if reached < stride

            row = [*open.map { |box| box[1] }, *boxes.first&.first].min
          end
        end

        # @return [Boolean]
        def contiguous?
          stride.nil?
        end

        # @return [Integer] the element of the tensor behind its last one
        def stop
          contiguous? ? start + count : start + (count / width - 1) * stride + width
        end

        # @return [Integer] how many of its elements lie before an element of the tensor
        def before(element)
          return (element - start).clamp(0, count) if contiguous?
          return 0 if element <= start

          row, column = (element - start).divmod(stride)
          [row * width + [column, width].min, count].min
        end

        # @return [Array<Region>] elements from `first` on, in the region's own order
        def part(first, number)
          contiguous? ? [Region.new(start + first, number)] : Region.cut(start, width, stride, first, number)
        end

        # Whether what both have follows each other in both.
        def aligned?(other)
          width == other.width && stride == other.stride && (contiguous? || ((start - other.start) % stride).zero?)
        end

        # The range within which both have elements; it may be that they have different ones there.
        #
        # @return [Array(Integer, Integer), nil] nil: they have no element in common
        def common(other)
          from = [start, other.start].max
          to = [stop, other.stop].min
          return if from >= to || [self, other].any? { |each| each.before(to) == each.before(from) }
          return if stride && stride == other.stride && ((start - other.start) % stride).between?(other.width, stride - width)

          [from, to]
        end

        # Views of a part of the tensor and of the region's own elements, piece by piece the same.
        #
        # @param tensor [Torch::Tensor] flat: the tensor's elements from `base` on
        # @param own [Torch::Tensor] flat: the region's
        def each_view(tensor, base, own)
          return yield(tensor.narrow(0, start - base, count), own) if contiguous?

          rows = count / width - 1
          above = tensor.narrow(0, start - base, rows * stride).view(rows, stride)
          yield above.narrow(1, 0, width), own.narrow(0, 0, rows * width).view(rows, width)
          # Behind the last row the tensor may end.
          yield tensor.narrow(0, start - base + rows * stride, width), own.narrow(0, rows * width, width)
        end

        # @param tensor [Torch::Tensor] as of {#each_view}
        # @return [Torch::Tensor] the region's elements, in memory of their own
        def take(tensor, base = 0)
          own = Torch.empty_like(tensor.narrow(0, 0, count))
          each_view(tensor, base, own) { |from, to| to.copy!(from) }
          own
        end

        # @return [Array<Array(Integer, Integer, Integer, Integer)>] rows from and to, columns from and to, in rows of `length` elements
        def boxes(length)
          return [[start / length, start / length + count / width, start % length, start % length + width]] if stride == length
          return part_of_rows.flat_map { |row| row.boxes(length) } if stride

          (row, left), (last, right) = start.divmod(length), stop.divmod(length)
          return [[row, row + 1, left, right]] if row == last

          [[row, row + 1, left, length], [row + 1, last, 0, length], [last, last + 1, 0, right]]
            .select { |above, below, from, to| above < below && from < to }
        end

        # @return [Array] for JSON
        def to_a
          contiguous? ? [start, count] : super
        end

        private

        def part_of_rows
          Array.new(count / width) { |row| Region.new(start + row * stride, width) }
        end
      end
    end
  end
end
