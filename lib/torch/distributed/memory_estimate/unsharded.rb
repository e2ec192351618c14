# frozen_string_literal: true

module Torch
  module Distributed
    class MemoryEstimate
      # Makes the sharder's steps with sizes alone: which units are unsharded when, and in which blocks of memory they and
      # their gradients are (src/sharder). Forward comes to the units in their order, all within that of the model itself;
      # backward in the reverse one, the model itself first.
      #
      # @api private
      class Unsharded
        # As in src/sharder/unit.c, in elements.
        ALIGNMENT = 16

        # The first iteration does not know which unit comes next, and after some the blocks have found their sizes.
        ITERATIONS = 4

        # Memory that units use one after the other, as in src/sharder/blocks.c.
        class Blocks
          Block = Struct.new(:bytes, :used)

          attr_reader :peak

          def initialize
            @blocks = []
            @peak = 0
          end

          def take(bytes)
            free = @blocks.reject(&:used)
            block = free.select { |each| each.bytes >= bytes }.min_by(&:bytes)
            unless block
              largest = free.max_by(&:bytes)
              @blocks.delete_if { |each| each.equal?(largest) }
              @blocks << (block = Block.new(bytes))
              @peak = [@peak, @blocks.sum(&:bytes)].max
            end
            block.used = true
            block
          end

          def give(block)
            block.used = false if block
          end
        end
        private_constant :Blocks

        # A unit: its shard's elements, the bytes of one when it is gathered and in its gradient; where it is.
        Unit = Struct.new(:shard, :ranks, :each, :gathered, :reduced, :trained, :reshards, :out, :cast, :gradient, :unsharded, :passed,
          keyword_init: true) do
          def shard_is_full?
            ranks == 1 && gathered == each
          end
        end
        private_constant :Unit

        class << self
          # @param sizes [Array<ModelSizes::Size>]
          # @param ranks [Integer]
          # @return [Integer] elements of each rank's shard
          def shard(sizes, ranks)
            full = sizes.sum { |size| padded(size.count) }
            padded((full + ranks - 1) / ranks)
          end

          private

          def padded(count)
            (count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT
          end
        end

        # @param units [Array<ModelSizes::Unit>]
        # @param root [ModelSizes::Unit, nil]
        # @param around [Array<Boolean>] whether the root has parameters before and after those of the others
        # @param ranks [Integer]
        # @param precision [Precision]
        # @param kept [Boolean] whether all units stay unsharded from forward to backward
        def initialize(units, root, around, ranks, precision, kept:)
          @before, @after = around
          @blocks = Blocks.new
          @order = units.map { |unit| unit_of(unit, ranks, precision, kept || unit.equal?(root) && unit.reshard.nil?) }
          @root = @order.first if root
          @layers = root ? @order.drop(1) : @order
          @reductions = []
        end

        # @return [Integer] bytes of the blocks, at most
        def peak
          ITERATIONS.times do |iteration|
            @known = iteration.positive?
            forward
            backward
          end
          @blocks.peak
        end

        private

        def unit_of(unit, ranks, precision, kept)
          each = unit.each_bytes
          Unit.new(shard: Unsharded.shard(unit.sizes, ranks), ranks: ranks, each: each, gathered: precision.gathered(unit.precision, each),
            reduced: precision.reduced(unit.precision, each), trained: unit.trained?, reshards: !kept && unit.reshard != false)
        end

        # --- gathering, as in gather.c

        def gather(unit)
          return if unit.unsharded

          unless unit.shard_is_full?
            unit.out = @blocks.take(unit.shard * unit.ranks * unit.gathered)
            unit.cast = @blocks.take(unit.shard * unit.gathered) if unit.gathered != unit.each
          end
          unit.unsharded = true
        end

        # The cast of the shard is needed until the unit is gathered.
        def unshard(unit)
          gather(unit)
          @blocks.give(unit.cast)
          unit.cast = nil
        end

        def reshard(unit)
          @blocks.give(unit.out)
          unit.out = nil
          unit.unsharded = false
        end

        # One at a time; the one before is used by then.
        def gather_ahead(unit)
          gather(unit) if unit
        end

        # --- an iteration

        def forward
          before_forward(@root) if @root
          @layers.each do |unit|
            before_forward(unit)
            after_forward(unit)
          end
          after_forward(@root) if @root
        end

        def before_forward(unit)
          unshard(unit)
          gather_ahead(@order[@order.index { |each| each.equal?(unit) } + 1]) if @known
        end

        def after_forward(unit)
          reshard(unit) if unit.reshards
        end

        # Backward comes to the model itself first. Its gradient is there from that of a head to that of an embedding, and is
        # reduced at the end in either case.
        def backward
          @order.each { |unit| unit.passed = false }
          before_backward(@root) if @root
          take_gradient(@root) if @after || !@before
          backward_of_layers
          take_gradient(@root) unless @after
          finish(@layers.first)
          finish(@root)
          complete_first until @reductions.empty?
        end

        # Backward is done with a unit when it comes to the one before it, and with the first one at its end.
        def backward_of_layers
          last = nil
          @layers.reverse_each do |unit|
            finish(last)
            before_backward(unit)
            take_gradient(unit)
            last = unit
          end
        end

        def finish(unit)
          return unless unit

          reshard(unit)
          reduce(unit)
        end

        def before_backward(unit)
          unshard(unit)
          unit.passed = true
          gather_ahead(@order.reverse_each.find { |each| !each.passed })
        end

        # --- gradients, as in reduce.c

        def take_gradient(unit)
          unit.gradient ||= @blocks.take(unit.shard * unit.ranks * unit.reduced) if unit&.trained
        end

        def reduce(unit)
          return unless unit.trained

          complete_first until @reductions.empty?
          out = @blocks.take(unit.shard * unit.reduced) if unit.ranks > 1
          @reductions << [unit.gradient, out]
          unit.gradient = nil
        end

        def complete_first
          @reductions.shift.each { |block| @blocks.give(block) }
        end
      end
      private_constant :Unsharded
    end
  end
end
