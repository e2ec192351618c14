# frozen_string_literal: true

require "cgi/escape"
require_relative "table"

module Collectives
  # The results as a picture: for each operation the time over the bytes, both in powers, a line for each series.
  class Chart
    PANEL_WIDTH = 420
    PANEL_HEIGHT = 300
    MARGIN = 60
    ACROSS = 3
    COLOURS = {"ours" => "#c0392b", "ours-any" => "#e08a3c", "ruby" => "#8e44ad", "ruby-any" => "#bb8fce", "floor" => "#555555", "gloo" => "#2f6fab",
               "openmpi" => "#4a9b5c", "pytorch" => "#3b9ca6", "deepspeed" => "#8a7a3d"}.freeze
    FONT = "font-family: sans-serif; font-size: 12px"

    # @param results [Results]
    # @param table [Table]
    def initialize(results, table)
      @results = results
      @table = table
      @series = results.series
      # Of a single size there is no line.
      @panels = results.cells.group_by { |ranks, cell| [ranks, cell.operation, cell.dtype, cell.loop] }
        .transform_values { |cells| cells.map(&:last) }.select { |_, cells| cells.size > 1 }
    end

    # @param path [String] ending in .svg or .html
    def write(path)
      require_gem
      File.write(path, path.end_with?(".html") ? html : draw.render)
    rescue LoadError
      warn "no chart: the gem victor is not installed (rake setup)"
    end

    private

    # Where the gems of this checkout are set up, they are used without `bundle exec` too.
    def require_gem
      require "victor"
    rescue LoadError
      ENV["BUNDLE_GEMFILE"] ||= File.join(ROOT, "Gemfile")
      require "bundler/setup"
      require "victor"
    end

    def html
      machine = @results.machine
      versions = @results.versions.map { |name, text| "<li>#{CGI.escapeHTML("#{name}: #{text}")}</li>" }.join
      <<~HTML
        <!DOCTYPE html>
        <html lang="en"><head><meta charset="utf-8"><title>Collectives</title>
        <style>body { #{FONT}; margin: 2em } pre { font-size: 12px }</style></head>
        <body><h1>Collectives</h1>
        <p>#{CGI.escapeHTML("#{machine[:cores]} cores, #{machine[:processor]}, Linux #{machine[:kernel]}")}</p><ul>#{versions}</ul>
        #{draw.render(template: :minimal)}
        <pre>#{CGI.escapeHTML(@table.text)}</pre>
        </body></html>
      HTML
    end

    def draw
      width = PANEL_WIDTH * ACROSS + 160
      height = [PANEL_HEIGHT * ((@panels.size + ACROSS - 1) / ACROSS), 40 + 22 * @series.size].max
      svg = Victor::SVG.new(width: width, height: height, viewBox: "0 0 #{width} #{height}", style: FONT)
      svg.rect(x: 0, y: 0, width: width, height: height, fill: "white")
      @panels.each_with_index do |(key, cells), i|
        panel(svg, key, cells, (i % ACROSS) * PANEL_WIDTH, (i / ACROSS) * PANEL_HEIGHT)
      end
      @series.each_with_index do |series, i|
        svg.rect(x: width - 150, y: 30 + 22 * i, width: 12, height: 12, fill: COLOURS[series.name])
        svg.text(series.title, x: width - 132, y: 41 + 22 * i)
      end
      svg
    end

    def panel(svg, key, cells, left, top)
      lines = lines_of(key.first, cells)
      times = lines.values.flatten(1).map(&:last)
      x = scale(cells.map(&:bytes).minmax, left + MARGIN, left + PANEL_WIDTH - 15)
      y = scale(times.minmax, top + PANEL_HEIGHT - 40, top + 35)
      svg.text("#{@table.heading(*key)}: µs", x: left + MARGIN, y: top + 22, style: "font-weight: bold")
      axes(svg, cells, times, x, y, [left, top])
      lines.each do |series, points|
        places = points.map { |bytes, time| format("%.1f,%.1f", x.call(bytes), y.call(time)) }.join(" ")
        svg.polyline(points: places, fill: "none", stroke: COLOURS[series.name], stroke_width: (series.name == "ours") ? 2.5 : 1.5) do
          svg.title(series.title)
        end
      end
    end

    def lines_of(ranks, cells)
      @series.to_h do |series|
        [series, cells.filter_map { |cell| (time = @results.time(ranks, cell, series.name)) && [cell.bytes, time] }]
      end.reject { |_, points| points.empty? }
    end

    def axes(svg, cells, times, x, y, (left, top))
      least, most = times.minmax.map { |time| Math.log10(time) }
      (least.floor..most.ceil).each do |power|
        next unless power.between?(least, most)

        svg.line(x1: left + MARGIN, x2: left + PANEL_WIDTH - 15, y1: y.call(10.0**power), y2: y.call(10.0**power), stroke: "#ddd")
        svg.text((power < 0) ? (10.0**power).round(-power).to_s : (10**power).to_s, x: left + MARGIN - 6, y: y.call(10.0**power) + 4, text_anchor: "end")
      end
      cells.map(&:bytes).uniq.each_slice(3) do |bytes, *|
        svg.text(Sizes.text(bytes), x: x.call(bytes), y: top + PANEL_HEIGHT - 22, text_anchor: "middle")
      end
    end

    # From values to places, by their logarithms.
    def scale((least, most), from, to)
      least = Math.log([least, 0.001].max)
      range = [Math.log(most) - least, 0.001].max
      ->(value) { from + (to - from) * (Math.log(value) - least) / range }
    end
  end
end
