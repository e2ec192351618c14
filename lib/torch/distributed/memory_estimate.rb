# frozen_string_literal: true

require_relative "../distributed"
require_relative "fsdp"

module Torch
  module Distributed
    # What each rank will hold of a model, by each way to distribute it: the result of {MemoryStats#estimate_memory}.
    #
    #   estimate = Torch::Distributed.estimate_memory(model, world_size: 4, batch: x, limit: 8 << 30)
    #   puts estimate
    #   estimate[:full_shard].total
    #   estimate.fitting                                   # => [:shard_grad_op, :full_shard]
    class MemoryEstimate
      include Enumerable

      # Parameters, gradients and the optimizer's state are on all ranks, as with DistributedDataParallel; the state is divided
      # (ZeroRedundancyOptimizer); all three are, and units stay gathered from forward to backward; or they don't.
      STRATEGIES = %i[no_shard zero shard_grad_op full_shard].freeze

      # Bytes of one rank.
      #
      # @!attribute strategy
      #   @return [Symbol]
      # @!attribute parameters
      #   @return [Integer] of the parameters that it keeps between steps, and of buffers
      # @!attribute gradients
      #   @return [Integer]
      # @!attribute optimizer
      #   @return [Integer] of the optimizer's state
      # @!attribute unsharded
      #   @return [Integer] of units that are gathered, and of their gradients until they are reduced, at most; without
      #     units, of the casts of parameters in mixed precision
      # @!attribute activations
      #   @return [Integer] that forward keeps for backward; 0 if there was no batch
      # @!attribute temporaries
      #   @return [Integer] what is beside these at once: results that backward does not need, but that Ruby has not collected
      #     yet, and what backward and the optimizer's step use meanwhile
      # @!attribute limit
      #   @return [Integer, nil]
      Row = Struct.new(:strategy, :parameters, :gradients, :optimizer, :unsharded, :activations, :temporaries, :limit) do
        # @return [Integer] the most that there is at once
        def total
          parameters + gradients + optimizer + unsharded + activations + temporaries
        end

        # @return [Boolean, nil] whether this is within the limit; nil: there is none
        def fits?
          limit && total <= limit
        end

        # @return [Hash{Symbol => Integer}]
        def to_h
          super.slice(*COLUMNS).merge(total: total)
        end
      end

      COLUMNS = %i[parameters gradients optimizer unsharded activations temporaries].freeze
      private_constant :COLUMNS

      class << self
        # @api private
        # @see MemoryStats#estimate_memory
        def of(model, optimizer:, world_size:, strategy:, mixed_precision:, batch:, checkpoint_ratio:, limit:, loss:)
          Arguments.check_model(model)
          ranks = Arguments.ranks(world_size)
          strategies = Arguments.strategies(strategy)
          limit = Arguments.limit(limit)
          Arguments.check_batch(batch, checkpoint_ratio, loss)
          cost = OptimizerCost.new(optimizer)
          precision = Precision.new(mixed_precision)
          sizes = ModelSizes.new(model)
          traced = scaled(TracedStep.new(model, batch, checkpoint_ratio, loss).bytes, sizes, precision) if batch
          rows = Strategies.new(sizes, cost, ranks, precision, traced, limit)
          new(strategies.map { |each| rows.row(each) }, "#{grouped(sizes.count)} parameters, #{sizes.units.size} unit#{"s" unless sizes.units.size == 1}, " \
            "#{ranks} rank#{"s" unless ranks == 1}, #{cost.name}", limit, !batch.nil?)
        end

        private

        # A model that is sharded already was traced in its units' own precision.
        def scaled(bytes, sizes, precision)
          own = sizes.sizes.map(&:each).max
          return bytes if sizes.sharded? || precision.param_dtype.nil? || own.nil?

          factor = precision.gathered(nil, own).fdiv(own)
          bytes.class.new(*bytes.to_a.map { |each| (each * factor).ceil })
        end

        def grouped(count)
          count.to_s.reverse.scan(/\d{1,3}/).join(",").reverse
        end
      end

      # @return [Integer, nil] bytes
      attr_reader :limit

      # @api private
      def initialize(rows, title, limit, traced)
        @rows = rows.to_h { |row| [row.strategy, row] }
        @title = title
        @limit = limit
        @traced = traced
      end

      # @param strategy [Symbol, String]
      # @return [Row]
      # @raise [KeyError] if it was not asked for
      def [](strategy)
        @rows.fetch(strategy.to_sym) { raise KeyError, "strategy: expected one of #{@rows.keys.inspect}, got #{strategy.inspect}" }
      end

      # @yieldparam row [Row]
      def each(&block)
        @rows.each_value(&block)
        self
      end

      # @return [Array<Symbol>] the strategies that are within the limit
      # @raise [ArgumentError] if there is none
      def fitting
        raise ArgumentError, "fitting: the estimate was made without a limit:" unless @limit

        select(&:fits?).map(&:strategy)
      end

      # @return [Hash{Symbol => Hash}] by strategies
      def to_h
        @rows.transform_values(&:to_h)
      end

      # @return [String] a table, in MiB
      def to_s
        lines = [["MiB on each rank", *COLUMNS, "total", *("fits" if @limit)].map(&:to_s)]
        each { |row| lines << line(row) }
        widths = lines.transpose.map { |column| column.map(&:size).max }
        table = lines.map { |cells| cells.each_with_index.map { |cell, i| i.zero? ? cell.ljust(widths[i]) : cell.rjust(widths[i]) }.join("  ") }
        [@title, *table, *notes].join("\n")
      end
      alias_method :inspect, :to_s

      private

      def line(row)
        cells = COLUMNS.map { |column| (column == :activations && !@traced) ? "?" : mib(row[column]) }
        [row.strategy.to_s, *cells, mib(row.total), *((row.fits? ? "yes" : "no") if @limit)]
      end

      def notes
        ["activations: unknown without a batch:, and not in the total"].reject { @traced } +
          ["limit: #{mib(@limit || 0)} MiB"].select { @limit }
      end

      def mib(bytes)
        format("%.1f", bytes.fdiv(1 << 20))
      end
    end
  end
end

require_relative "memory_estimate/arguments"
require_relative "memory_estimate/measured"
require_relative "memory_estimate/model_sizes"
require_relative "memory_estimate/optimizer_cost"
require_relative "memory_estimate/precision"
require_relative "memory_estimate/strategies"
require_relative "memory_estimate/traced_step"
require_relative "memory_estimate/unsharded"
