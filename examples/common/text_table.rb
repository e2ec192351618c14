# frozen_string_literal: true

# Rows of text with their columns aligned: numbers to the right, words to the left.
module TextTable
  module_function

  # @param headers [Array<String>]
  # @param rows [Array<Array>] strings and numbers; a row may be shorter, then its last cell may be long
  # @return [String] the table, with no newline at its end
  def format(headers, rows)
    cells = rows.map { |row| row.map(&:to_s) }
    widths = headers.each_index.map do |i|
      [headers[i].size, *cells.filter_map { |row| row[i]&.size unless cut_short?(row, i, headers) }].max
    end
    right = headers.each_index.map { |i| rows.any? && rows.all? { |row| row[i].nil? || cut_short?(row, i, headers) || number?(row[i]) } }
    lines = [headers, *cells].map { |row| line(row, widths, right) }
    lines.insert(1, widths.map { |width| "-" * width }.join("-+-")).join("\n")
  end

  def line(row, widths, right)
    row.each_with_index.map { |cell, i| (right[i] && !cut_short?(row, i, widths)) ? cell.rjust(widths[i]) : cell.ljust(widths[i]) }
      .join(" | ").rstrip
  end

  # The last cell of a row that ends early may reach into the columns behind it.
  def cut_short?(row, i, headers)
    row.size < headers.size && i == row.size - 1
  end

  def number?(cell)
    cell.is_a?(Numeric) || cell.to_s.match?(/\A[-+]?\d[\d,.]*(?:e[-+]?\d+)?%?\z/)
  end

  private_class_method :line, :cut_short?, :number?
end
