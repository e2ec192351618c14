# frozen_string_literal: true

require "cgi/escape"
require "victor"
require_relative "training_report"

# The benchmark as a picture: bars for images per second by batch size, and below them the loss over time, one
# colour for each backend and number of processes.
class TrainingChart
  WIDTH = 860
  HEIGHT = 660
  LEFT = 70
  RIGHT = 620 # the legend stands to the right of this
  COLOURS = %w[#2f6fab #d1762c #4a9b5c #a8506e #7a6bb5 #8a7a3d #3b9ca6 #777777].freeze
  FONT = "font-family: sans-serif; font-size: 12px"

  # A rectangle of the picture in which values become places.
  Panel = Struct.new(:top, :bottom, :x_max, :y_max) do
    def x(value)
      LEFT + (RIGHT - LEFT) * value / x_max.to_f
    end

    def y(value)
      bottom - (bottom - top) * value / y_max.to_f
    end
  end

  # @param report [TrainingReport]
  def initialize(report)
    @report = report
    @results = report.results
    @series = @results.map { |result| series_of(result) }.uniq
    @batches = @results.map(&:batch_size).uniq.sort
  end

  # @return [String] a whole SVG file
  def svg
    draw.render
  end

  # @return [String] a page with the picture and the table
  def html
    row = ->(cells, tag) { "<tr>#{cells.map { |cell| "<#{tag}>#{CGI.escapeHTML(cell.to_s)}</#{tag}>" }.join}</tr>" }
    <<~HTML
      <!DOCTYPE html>
      <html lang="en"><head><meta charset="utf-8"><title>#{CGI.escapeHTML(title)}</title>
      <style>body { #{FONT}; margin: 2em } table { border-collapse: collapse } th, td { padding: 3px 10px; border-bottom: 1px solid #ccc;
      text-align: right } td:first-child, th:first-child { text-align: left }</style></head>
      <body>
      #{draw.render(template: :minimal)}
      <table>
      #{row.call(TrainingReport::HEADERS, "th")}
      #{@report.cells.map { |cells| row.call(cells, "td") }.join("\n")}
      </table>
      </body></html>
    HTML
  end

  private

  def title
    "Training #{@report.options[:arch]}: #{@report.options[:steps]} steps after #{@report.options[:warmup]} of warm-up"
  end

  def series_of(result)
    "#{result.backend}, #{result.processes} #{(result.processes == 1) ? "process" : "processes"}"
  end

  def draw
    svg = Victor::SVG.new(width: WIDTH, height: HEIGHT, viewBox: "0 0 #{WIDTH} #{HEIGHT}", style: FONT)
    svg.rect(x: 0, y: 0, width: WIDTH, height: HEIGHT, fill: "white")
    svg.text(title, x: LEFT, y: 24, style: "font-size: 16px")
    if @results.empty?
      svg.text("nothing could be measured", x: LEFT, y: 60)
    else
      bars(svg)
      curves(svg)
      legend(svg)
    end
    svg
  end

  def bars(svg)
    panel = Panel.new(60, 300, @batches.size, @results.map(&:images_per_second).max * 1.05)
    frame(svg, panel, "images per second, by batch size of each process")
    width = 0.8 / @series.size
    @results.each do |result|
      left = @batches.index(result.batch_size) + 0.1 + width * @series.index(series_of(result))
      y = panel.y(result.images_per_second)
      svg.rect(x: panel.x(left), y: y, width: panel.x(width * 0.92) - LEFT, height: panel.bottom - y, fill: colour(result)) do
        svg.title("#{series_of(result)}, batch #{result.batch_size}: #{format("%.1f", result.images_per_second)} images/s")
      end
    end
    @batches.each_with_index do |batch, i|
      svg.text(batch.to_s, x: panel.x(i + 0.5), y: panel.bottom + 16, text_anchor: "middle")
    end
  end

  # Of each series the curve of each batch size, the larger ones the thinner.
  def curves(svg)
    panel = Panel.new(380, 600, @results.map(&:seconds).max, @results.flat_map(&:losses).max * 1.05)
    frame(svg, panel, "loss over seconds of training")
    @results.each do |result|
      points = smoothed(result.losses).each_with_index.map do |loss, i|
        format("%.1f,%.1f", panel.x(result.seconds * (i + 1) / result.losses.size), panel.y(loss))
      end
      svg.polyline(points: points.join(" "), fill: "none", stroke: colour(result),
        stroke_width: [2.5 - 0.5 * @batches.index(result.batch_size), 0.75].max) do
        svg.title("#{series_of(result)}, batch #{result.batch_size}: #{format("%.4f", result.final_loss)} at the end")
      end
    end
    ticks(panel.x_max).each do |value|
      svg.text(label(value), x: panel.x(value), y: panel.bottom + 16, text_anchor: "middle")
    end
  end

  def frame(svg, panel, heading)
    svg.text(heading, x: LEFT, y: panel.top - 10, style: "font-weight: bold")
    ticks(panel.y_max).each do |value|
      svg.line(x1: LEFT, x2: RIGHT, y1: panel.y(value), y2: panel.y(value), stroke: value.zero? ? "#444" : "#ddd")
      svg.text(label(value), x: LEFT - 6, y: panel.y(value) + 4, text_anchor: "end")
    end
  end

  def legend(svg)
    @series.each_with_index do |series, i|
      svg.rect(x: RIGHT + 24, y: 60 + 22 * i, width: 12, height: 12, fill: COLOURS[i % COLOURS.size])
      svg.text(series, x: RIGHT + 44, y: 71 + 22 * i)
    end
    notes = @report.rows.grep(TrainingReport::Missing).map { |row| "#{row.backend}: not available" }.uniq
    notes << "lines: the larger the batch, the thinner" if @batches.size > 1
    notes.each_with_index do |line, i|
      svg.text(line, x: RIGHT + 24, y: 71 + 22 * (@series.size + i), fill: "#777")
    end
  end

  # Each step with the two before and after it: single batches vary too much to be distinguished.
  def smoothed(losses)
    losses.each_index.map do |i|
      near = losses[[i - 2, 0].max..i + 2]
      near.sum / near.size
    end
  end

  # Round numbers from 0 on, about five of them.
  def ticks(max)
    step = 10.0**Math.log10(max / 5.0).floor
    step *= [1, 2, 5, 10].find { |factor| max / (step * factor) <= 6 }
    (0..(max / step).floor).map { |i| i * step }
  end

  def label(value)
    (value == value.round) ? value.round.to_s : format("%.3g", value)
  end

  def colour(result)
    COLOURS[@series.index(series_of(result)) % COLOURS.size]
  end
end
