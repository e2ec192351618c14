# frozen_string_literal: true

require "victor"

# Bars of images per second on several ranks: each model and batch size has a panel of its own, since they differ by
# orders of magnitude.
class ComparisonChart
  COLOURS = {["torch-ddp", true] => "#c0392b", ["torch-ddp", false] => "#e59b91", ["PyTorch", true] => "#5f6b76", ["PyTorch", false] => "#b4bcc4"}.freeze
  PANEL = 146
  BAR = 26
  TOP = 58
  HEIGHT = 170
  LEFT = 12

  # @param figures [Hash] Comparison#figures
  # @param ranks [Integer]
  def initialize(figures, ranks)
    @versions = figures[:versions]
    @ranks = ranks
    rows = figures[:steps].select { |row| row[:ddp] && row[:ranks] == ranks }
    @panels = rows.group_by { |row| [row[:model], row[:batch]] }
  end

  # @return [String] the contents of an SVG file
  def svg
    width = LEFT * 2 + PANEL * @panels.size
    picture = Victor::SVG.new(width: width, height: TOP + HEIGHT + 44, viewBox: "0 0 #{width} #{TOP + HEIGHT + 44}",
      style: "font-family: sans-serif; font-size: 12px")
    picture.rect(x: 0, y: 0, width: "100%", height: "100%", fill: "white")
    picture.text("Images per second on #{@ranks} ranks: #{@versions.values_at("torch-ddp", "PyTorch").join(", ")}", x: LEFT, y: 20,
      style: "font-size: 14px; font-weight: bold")
    legend(picture)
    @panels.each_value.with_index { |rows, at| panel(picture, rows, LEFT + PANEL * at) }
    picture.render
  end

  private

  def legend(picture)
    COLOURS.each_with_index do |((program, fused), colour), at|
      picture.rect(x: LEFT + 165 * at, y: 32, width: 11, height: 11, fill: colour)
      picture.text("#{program}, #{fused ? "fused" : "plain"}", x: LEFT + 165 * at + 16, y: 42)
    end
  end

  def panel(picture, rows, left)
    most = rows.map { |row| per_second(row) }.max
    COLOURS.each_with_index do |((program, fused), colour), at|
      row = rows.find { |each| each[:program] == program && (each[:optimizer] != "plain") == fused } or next
      height = HEIGHT * per_second(row) / most * 0.92
      x = left + (BAR + 6) * at
      picture.rect(x: x, y: TOP + HEIGHT - height, width: BAR, height: height, fill: colour)
      picture.text(short(per_second(row)), x: x + BAR / 2, y: TOP + HEIGHT - height - 4, text_anchor: "middle", style: "font-size: 10px")
    end
    picture.line(x1: left, x2: left + PANEL - 22, y1: TOP + HEIGHT, y2: TOP + HEIGHT, stroke: "#444")
    picture.text("#{rows.first[:model]}, batch #{rows.first[:batch]}", x: left + (PANEL - 22) / 2, y: TOP + HEIGHT + 17, text_anchor: "middle")
  end

  def per_second(row)
    1000.0 * row[:batch] * row[:ranks] / row[:milliseconds]
  end

  def short(value)
    (value >= 10_000) ? "#{(value / 1000).round}k" : value.round.to_s
  end
end
