# frozen_string_literal: true

module Torch
  module Distributed
    module Algorithms
      module DDPCommHooks
        # PowerSGD of gradients on devices, by libtorch's operations there: what libtddp's hook does in the CPU's memory. No step of it
        # has the host wait for the device.
        #
        # P and Q are equal on all ranks after their averages. If an element of a matrix is not finite on a rank, its result is not
        # finite on all of them, and its error and its Q begin again from nothing.
        #
        # @api private
        class PowerSGD
          # What is kept of a bucket between iterations, by matrix. Another layout of the buckets begins from nothing.
          Kept = Struct.new(:key, :errors, :qs, :first)
          private_constant :Kept

          # @param options [Hash] those of {PowerSGDState}
          # @param batched [Boolean] whether a bucket is one matrix
          # @param group [ProcessGroup]
          def initialize(options, batched, group)
            @options = options
            @batched = batched
            @group = group
            @kept = {}
          end

          # @param bucket [GradBucket]
          # @return [Work, Torch::Tensor]
          def call(bucket)
            return average(bucket.buffer) if bucket.iteration < @options[:start_iteration]

            matrices, others = @batched ? [[square(bucket.buffer)], []] : divided(bucket.gradients)
            return average(bucket.buffer) if matrices.empty?

            compress(bucket, matrices, others)
          end

          private

          def average(tensor)
            Distributed.all_reduce(tensor, op: :avg, group: @group, async_op: true)
          end

          # A bucket as a square matrix, filled up with zeros.
          def square(buffer)
            side = Math.sqrt(buffer.numel).ceil
            Torch.zeros([side * side], dtype: buffer.dtype, device: buffer.device).tap { |all| all.narrow(0, 0, buffer.numel).copy!(buffer) }
              .reshape([side, side])
          end

          # @return [Array(Array, Array)] the gradients that become matrices, and those that are sent as they are
          def divided(gradients)
            gradients.partition do |gradient|
              next false if gradient.dim < 2

              rows, cols = [gradient.shape[0], gradient.numel / [gradient.shape[0], 1].max]
              (rows + cols) * [@options[:rank], rows, cols].min * @options[:min_compression_rate] < rows * cols
            end
          end

          def compress(bucket, gradients, others)
            kept = kept_of(bucket)
            matrices = gradients.map.with_index { |gradient, i| matrix(gradient, kept.errors[i]) }
            qs = matrices.map.with_index do |each, i|
              kept.first[i] = random(each, [bucket.iteration, bucket.index, i]) unless kept.qs[i]
              orthonormal(kept.qs[i] || kept.first[i], kept.first[i])
            end
            first = together(matrices.zip(qs).map { |each, q| each.matmul(q) } + others, bucket.buffer.dtype)
            average(first).get_future.then do
              ps = parts(first, matrices.zip(qs).map { |each, q| [each.shape[0], q.shape[1]] } + others.map(&:shape))
              others.zip(ps.drop(matrices.size)) { |into, value| into.copy!(value) }
              ps = ps.first(matrices.size).zip(matrices).map { |p, each| orthonormal(p.to(dtype: each.dtype)) }
              second = together(matrices.zip(ps).map { |each, p| each.t.matmul(p) }, bucket.buffer.dtype)
              average(second).get_future.then { decompress(bucket, kept, gradients, matrices, ps, second) }
            end
          end

          def decompress(bucket, kept, gradients, matrices, ps, second)
            qs = parts(second, matrices.zip(ps).map { |each, p| [each.shape[1], p.shape[1]] }).zip(matrices).map { |q, each| q.to(dtype: each.dtype) }
            gradients.each_with_index do |gradient, i|
              product = ps[i].matmul(qs[i].t)
              kept.errors[i] = without_faults(matrices[i] - product) if @options[:error_feedback]
              kept.qs[i] = Torch.where(sound(qs[i]), qs[i], kept.first[i]) if @options[:warm_start]
              @batched ? bucket.buffer.copy!(product.reshape([-1]).narrow(0, 0, bucket.buffer.numel)) : gradient.copy!(product.reshape(gradient.shape))
            end
            bucket.buffer
          end

          def kept_of(bucket)
            key = [bucket.parameter_indices, bucket.buffer.shape, bucket.buffer.dtype]
            @kept[bucket.index] = Kept.new(key, [], [], []) unless @kept[bucket.index]&.key == key
            @kept[bucket.index]
          end

          # Halves are computed in single precision. With the last iteration's error.
          def matrix(gradient, error)
            dtype = (gradient.dtype == :float64) ? :float64 : :float32
            values = gradient.reshape([gradient.shape[0], -1]).to(dtype: dtype)
            error ? values + error : values
          end

          # The same on all ranks.
          def random(matrix, place)
            cols = matrix.shape[1]
            rank = [@options[:rank], *matrix.shape].min
            numbers = ::Random.new(place.inject(@options[:seed]) { |seed, number| seed * 1_000_003 + number })
            Torch.tensor(Array.new(cols * rank) { numbers.rand - 0.5 }, dtype: matrix.dtype).reshape([cols, rank]).to(matrix.device)
          end

          # Gram and Schmidt's way, column after column. One that the others leave nothing of is replaced by that of `spare`, and is zero
          # without that.
          def orthonormal(matrix, spare = nil)
            done = []
            matrix.shape[1].times do |i|
              column = rest_of(matrix.narrow(1, i, 1), done)
              column = Torch.where(empty(column), rest_of(spare.narrow(1, i, 1), done), column) if spare
              done << column / (length(column) + @options[:orthogonalization_epsilon]).clamp(min: SMALLEST)
            end
            Torch.cat(done, 1)
          end

          # What a column has beside others; zero if that is no more than rounding.
          def rest_of(column, done)
            least = length(column) * ((column.dtype == :float64) ? 1e-12 : 1e-5)
            2.times { done.each { |other| column -= other * (other * column).sum } }
            Torch.where(length(column).lt(least).expand(column.shape), Torch.zeros_like(column), column)
          end

          def length(column)
            (column * column).sum.sqrt
          end

          def empty(column)
            length(column).eq(0).expand(column.shape)
          end

          def without_faults(error)
            Torch.where(sound(error), error, Torch.zeros_like(error))
          end

          # True or false for all of a matrix.
          def sound(matrix)
            Torch.isfinite(matrix.sum).expand(matrix.shape)
          end

          def together(tensors, dtype)
            Torch.cat(tensors.map { |each| each.reshape([-1]).to(dtype: dtype) })
          end

          def parts(flat, shapes)
            at = 0
            shapes.map do |shape|
              size = shape.inject(1, :*)
              flat.narrow(0, (at += size) - size, size).reshape(shape)
            end
          end

          # A length at least.
          SMALLEST = 1e-30
          private_constant :SMALLEST
        end
        private_constant :PowerSGD
      end
    end
  end
end
