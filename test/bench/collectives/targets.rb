# frozen_string_literal: true

module Collectives
  # What all of this is to reach, and whether it does: a line for each. Nothing here fails a run.
  class Targets
    KIB = 1024
    MIB = 1024 * 1024
    # float32 all_reduce of two ranks: at most so many times the floor's time with registered and with any memory, at
    # least so many times faster than OpenMPI and PyTorch.
    ALL_REDUCE = {
      8 => [3, 3, 1, 40], 64 * KIB => [2, 4, 2, 20], MIB => [1.3, 2.5, 3, 20], 16 * MIB => [1.25, 2, 4, 8], 64 * MIB => [1.25, 2, 4, 8]
    }.freeze
    RUBY_US = 10 # 8 bytes from Ruby
    OURS = %w[ours ours-any].freeze
    NEVER_SLOWER = %w[broadcast all_gather reduce_scatter all_to_all].freeze

    # @param results [Results]
    def initialize(results)
      @results = results
    end

    # @return [Array<Hash>] what, measured, target, met
    def verdicts
      return between_hosts.compact if @results.options[:hosts] > 1

      [*sizes, *latency_from_ruby, *deepspeed, *operations, *more_ranks].compact
    end

    # @return [Array<String>]
    def lines
      verdicts.map { |verdict| "#{verdict[:met] ? "met   " : "MISSED"} #{verdict[:what]}: #{verdict[:measured]}, target #{verdict[:target]}" }
    end

    private

    def cells(ranks)
      @results.cells.filter_map { |count, cell| cell if count == ranks && cell.dtype == "float32" && !cell.loop }
    end

    def all_reduce(bytes)
      cells(2).find { |cell| cell.operation == "all_reduce" && cell.bytes == bytes }
    end

    def sizes
      ALL_REDUCE.flat_map do |bytes, (registered, any, mpi, pytorch)|
        cell = all_reduce(bytes) or next []
        both = [cell, cell.back_to_back] # the latter of small sizes only
        both.flat_map do |one|
          [at_most(one, "ours", "floor", registered), at_most(one, "ours-any", "floor", any)] +
            OURS.flat_map { |name| [at_least(one, name, "openmpi", mpi), at_least(one, name, "pytorch", pytorch)] }
        end
      end
    end

    def latency_from_ruby
      cell = all_reduce(8) or return []
      [cell, cell.back_to_back].product(%w[ruby ruby-any]).filter_map do |one, name|
        time = @results.time(2, one, name) or next
        {what: what(one, name), measured: format("%.1f us", time), target: "at most #{RUBY_US} us", met: time <= RUBY_US}
      end
    end

    def what(cell, name)
      "all_reduce of #{Sizes.text(cell.bytes)}#{" back to back" if cell.loop}, #{name}"
    end

    def at_most(cell, name, other, target)
      middle, least, most = @results.ratio(2, cell, name, other)
      return unless middle

      {what: what(cell, name), measured: format("%.2f times %s's time (%.2f to %.2f)", middle, other, least, most),
       target: "at most #{target}", met: middle <= target}
    end

    def at_least(cell, name, other, target)
      middle, least, most = @results.ratio(2, cell, other, name)
      return unless middle

      {what: what(cell, name), measured: format("%.2f times faster than %s (%.2f to %.2f)", middle, other, least, most),
       target: "at least #{target}", met: middle >= target}
    end

    def deepspeed
      OURS.map { |name| never_slower(2, cells(2).select { |cell| cell.operation == "all_reduce" && cell.bytes >= KIB }, "all_reduce", name, "deepspeed") }
    end

    def between_hosts
      @results.cells.map(&:first).uniq.product(OURS, %w[openmpi pytorch]).flat_map do |ranks, name, other|
        cells(ranks).group_by(&:operation).map { |operation, all| never_slower(ranks, all, operation, name, other) }
      end
    end

    def operations
      NEVER_SLOWER.product(OURS).map do |operation, name|
        never_slower(2, cells(2).select { |cell| cell.operation == operation }, operation, name, "openmpi")
      end
    end

    def more_ranks
      @results.cells.map(&:first).uniq.select { |ranks| ranks > 2 }.product(OURS).flat_map do |ranks, name|
        cells(ranks).group_by(&:operation).map { |operation, all| never_slower(ranks, all, operation, name, "openmpi") }
      end
    end

    # One line for all sizes: where it is nearest to being slower, and where it is slower.
    def never_slower(ranks, cells, operation, name, other)
      ratios = cells.filter_map { |cell| [cell, @results.ratio(ranks, cell, other, name)&.first] }.select(&:last)
      return if ratios.empty?

      worst, ratio = ratios.min_by(&:last)
      slower = ratios.select { |_, value| value < 1 }.map { |cell, value| format("%s (%.2f)", Sizes.text(cell.bytes), value) }
      measured = format("at worst %.2f times as fast, at %s", ratio, Sizes.text(worst.bytes))
      measured += "; slower at #{slower.join(", ")}" unless slower.empty?
      {what: "#{operation}, #{ranks} ranks, #{name} beside #{other}", measured: measured, target: "never slower", met: slower.empty?}
    end
  end

  # Sizes as people write them.
  module Sizes
    module_function

    def text(bytes)
      return "#{bytes >> 20} MiB" if bytes >= 1 << 20 && (bytes % (1 << 20)).zero?
      return "#{bytes >> 10} KiB" if bytes >= 1 << 10 && (bytes % (1 << 10)).zero?

      "#{bytes} B"
    end

    # "64K", "16M" or a number.
    #
    # @return [Integer, nil]
    def parse(text)
      number, unit = text.match(/\A(\d+)([KMG]?)(?:i?B)?\z/i)&.captures
      Integer(number, 10) << {"" => 0, "K" => 10, "M" => 20, "G" => 30}.fetch(unit.upcase) if number
    end

    # `least`, then the powers of `factor` up to `most`.
    def powers(least, most, factor)
      powers = [1]
      powers << powers.last * factor while powers.last <= most
      [least, *powers.select { |power| power > least && power <= most }]
    end
  end
end
