# frozen_string_literal: true

module Torch
  module Distributed
    module Pipelining
      # Divides batches by their first dimension, and puts results together.
      #
      # @api private
      module MicroBatches
        class << self
          # @param value [Object] tensors, also nested; those without a dimension, and all else, go to every micro-batch
          # @return [Array<Object>] one for each micro-batch; sizes differ by one at most, the larger ones first
          # @raise [ArgumentError] if a tensor has fewer rows than there are micro-batches
          def split(name, value, count)
            check(name, value, count)
            Array.new(count) do |i|
              Nested.map(value) do |tensor|
                next tensor if tensor.dim.zero?

                rows = tensor.size(0)
                at = i * (rows / count) + [i, rows % count].min
                tensor.narrow(0, at, rows / count + ((i < rows % count) ? 1 : 0))
              end
            end
          end

          # @raise [ArgumentError] if a tensor has fewer rows than there are micro-batches
          def check(name, value, count)
            few = Nested.tensors(value).find { |tensor| !tensor.dim.zero? && tensor.size(0) < count } or return

            raise ArgumentError, "#{name}: expected at least n_microbatches = #{count} rows to divide, got #{few.size(0)} " \
              "(shape #{few.shape})"
          end

          # @param parts [Array<Array<Torch::Tensor>>] the tensors of each micro-batch
          # @return [Array<Torch::Tensor>]
          def join(parts)
            parts.transpose.map { |list| list.first.dim.zero? ? Torch.stack(list) : Torch.cat(list) }
          end

          # What part of the batch each micro-batch is.
          #
          # @return [Array<Float>] their sum is 1
          def weights(targets)
            rows = targets.map { |target| Nested.tensors(target).find { |tensor| !tensor.dim.zero? }&.size(0) }
            return targets.map { 1.0 / targets.size } unless rows.all?

            rows.map { |each| each.fdiv(rows.sum) }
          end
        end
      end
    end
  end
end
