# frozen_string_literal: true

require_relative "targets"

module Collectives
  # The results as plain text.
  class Table
    # @param results [Results]
    def initialize(results)
      @results = results
      @series = results.series
    end

    # @return [String]
    def text
      parts = @results.cells.group_by { |ranks, cell| [ranks, cell.operation, cell.dtype, cell.loop] }.map { |key, cells| section(key, cells.map(&:last)) }
      [*parts, *notes].join("\n\n")
    end

    # Headers and rows of one operation, for whoever draws it in another way.
    def rows(ranks, cells)
      series = @series.select { |one| cells.any? { |cell| @results.time(ranks, cell, one.name) } }
      first = series.first
      headers = ["bytes", *series.map(&:title), "bus GB/s"]
      body = cells.map do |cell|
        times = series.map { |one| cell_text(ranks, cell, one, first) }
        bus = @results.bandwidth(ranks, cell, first.name)&.last
        [Sizes.text(cell.bytes), *times, bus ? format("%.2f", bus) : "-"]
      end
      [headers, body]
    end

    def heading(ranks, operation, dtype, loop)
      "#{operation}#{" of #{dtype}" unless operation == "barrier"}, #{ranks} ranks#{", back to back" if loop}"
    end

    private

    def section(key, cells)
      headers, body = rows(key.first, cells)
      widths = headers.each_index.map { |i| [headers[i].size, *body.map { |row| row[i].size }].max }
      lines = [headers, *body].map { |row| row.each_with_index.map { |text, i| text.rjust(widths[i]) }.join("  ") }
      "#{heading(*key)}: microseconds (times #{headers[1]}'s); bus bandwidth of #{headers[1]}\n#{lines.join("\n")}"
    end

    def cell_text(ranks, cell, series, first)
      time = @results.time(ranks, cell, series.name) or return "-"
      text = number(time)
      return text if series == first

      ratio = @results.ratio(ranks, cell, series.name, first.name)&.first
      ratio ? "#{text} (#{number(ratio)})" : text
    end

    # Three digits.
    def number(value)
      decimals = [2 - Math.log10([value, 1].max).floor, 0].max
      format("%.#{decimals}f", value)
    end

    def notes
      wrong = @results.wrong
      parts = []
      parts << "left out:\n#{@results.skipped.map { |what, why| "  #{what}: #{why}" }.join("\n")}" unless @results.skipped.empty?
      lines = Targets.new(@results).lines
      parts << "targets:\n#{lines.map { |line| "  #{line}" }.join("\n")}" unless lines.empty?
      parts << if !@results.options[:check]
        "results were not checked"
      elsif wrong.empty?
        "results: all #{@results.checked} measurements had the right values"
      else
        "WRONG RESULTS:\n#{wrong.map { |line| "  #{line}" }.join("\n")}"
      end
    end
  end
end
