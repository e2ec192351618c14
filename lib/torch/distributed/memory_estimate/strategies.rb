# frozen_string_literal: true

module Torch
  module Distributed
    class MemoryEstimate
      # What a rank holds of a model by each strategy.
      #
      # @api private
      class Strategies
        # As in src/flat/flat.h: of each gradient's slice of a bucket, in bytes.
        BUCKET_ALIGNMENT = 64

        # @param sizes [ModelSizes]
        # @param optimizer [OptimizerCost]
        # @param ranks [Integer]
        # @param precision [Precision]
        # @param traced [TracedStep::Bytes, nil]
        # @param limit [Integer, nil]
        def initialize(sizes, optimizer, ranks, precision, traced, limit)
          @sizes = sizes
          @optimizer = optimizer
          @ranks = ranks
          @precision = precision
          @traced = traced
          @limit = limit
          @trained = sizes.sizes.select(&:trained)
        end

        # @param strategy [Symbol]
        # @return [Row]
        def row(strategy)
          case strategy
          when :no_shard then replicated(strategy, 1)
          when :zero then replicated(strategy, @ranks)
          else sharded(strategy)
          end
        end

        private

        # `parts`: between how many ranks the optimizer's state is divided.
        def replicated(strategy, parts)
          gradients = @trained.sum { |each| (each.bytes + BUCKET_ALIGNMENT - 1) / BUCKET_ALIGNMENT * BUCKET_ALIGNMENT }
          counts = @trained.group_by(&:dtype).transform_values { |list| (list.sum(&:count) + parts - 1) / parts }
          # After the first iteration there are the buckets of before and after for a moment.
          row_of(strategy, counts, rebuilt: gradients, parameters: @sizes.sizes.sum(&:bytes), gradients: gradients, unsharded: casts)
        end

        # DistributedDataParallel casts all parameters in forward.
        def casts
          return 0 unless @precision.param_dtype

          @trained.sum { |each| (@precision.gathered(nil, each.each) == each.each) ? 0 : each.count * @precision.gathered(nil, each.each) }
        end

        def sharded(strategy)
          counts = Hash.new(0)
          shards = @sizes.units.map do |unit|
            shard = Unsharded.shard(unit.sizes, unit.ranks || @ranks)
            counts[unit.sizes.first.dtype] += [shard, unit.trained_count].min
            [shard * unit.each_bytes, unit.trained?]
          end
          @sizes.others.select(&:trained).each { |each| counts[each.dtype] += each.count }
          row_of(strategy, counts, parameters: shards.sum(&:first) + @sizes.others.sum(&:bytes),
            gradients: shards.sum { |bytes, trained| trained ? bytes : 0 } + @sizes.others.select(&:trained).sum(&:bytes),
            unsharded: unsharded(strategy))
        end

        def unsharded(strategy)
          @sizes.units.group_by { |unit| unit.ranks || @ranks }.sum do |ranks, units|
            Unsharded.new(units, units.find { |unit| unit.equal?(@sizes.root) }, @sizes.around, ranks, @precision, kept: strategy == :shard_grad_op).peak
          end
        end

        # `counts`: elements that the optimizer steps on, by dtype.
        def row_of(strategy, counts, parameters:, gradients:, unsharded:, rebuilt: 0)
          state, left = %i[state left].map { |kind| counts.sum { |dtype, count| (count * @optimizer.of(dtype)[kind]).ceil } }
          activations = @traced ? @traced.saved : 0
          most = [rebuilt, @traced ? @traced.peak : largest_gradient, (@traced ? @traced.left : 0) + left].max
          Row.new(strategy, parameters + @sizes.buffer_bytes, gradients, state, unsharded, activations, [most - activations, 0].max, @limit)
        end

        # Autograd makes a gradient before it is copied to where it belongs.
        def largest_gradient
          @trained.map(&:bytes).max || 0
        end
      end
      private_constant :Strategies
    end
  end
end
