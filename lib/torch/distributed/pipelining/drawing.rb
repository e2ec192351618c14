# frozen_string_literal: true

module Torch
  module Distributed
    module Pipelining
      # A timeline as an SVG, as textbooks show schedules: a row for each rank, a box for each action with its micro-batch's number;
      # forward blue, backward green, weights' gradients orange, darker for a rank's further stages.
      #
      # @api private
      class Drawing
        ROW = 28
        LEFT = 64
        TOP = 30
        # The shortest action's width, unless the picture would become wider than this.
        BOX = 24.0
        WIDEST = 4000.0
        HUES = {F: 212, B: 140, I: 140, W: 32}.freeze
        private_constant :ROW, :LEFT, :TOP, :BOX, :WIDEST, :HUES

        # @param timeline [Timeline]
        # @param title [String]
        def initialize(timeline, title)
          @timeline = timeline
          @title = title
          spans = timeline.ranks.flatten
          @start = spans.map(&:start).min
          shortest = spans.map { |span| span.finish - span.start }.select(&:positive?).min || 1
          @scale = [BOX / shortest, WIDEST / timeline.length].min
        end

        # @return [String]
        def to_svg
          width = (LEFT + @timeline.length * @scale + 10).ceil
          height = TOP + @timeline.ranks.size * ROW + 10
          rows = @timeline.ranks.each_with_index.map { |spans, rank| row(spans, rank) }
          <<~SVG
            <svg xmlns="http://www.w3.org/2000/svg" width="#{width}" height="#{height}" viewBox="0 0 #{width} #{height}"
                 font-family="sans-serif" font-size="12">
            <rect width="100%" height="100%" fill="white"/>
            <text x="8" y="19">#{escape(@title)}: bubble #{format("%.1f", 100 * @timeline.bubble)} %</text>
            #{rows.join("\n")}
            </svg>
          SVG
        end

        private

        def row(spans, rank)
          y = TOP + rank * ROW
          boxes = spans.map { |span| box(span, y) }
          [%(<text x="8" y="#{y + 18}">rank #{rank}</text>), *boxes].join("\n")
        end

        def box(span, y)
          action = span.action
          x = (LEFT + (span.start - @start) * @scale).round(2)
          width = ((span.finish - span.start) * @scale).round(2)
          label = %(<text x="#{(x + width / 2).round(2)}" y="#{y + 17}" text-anchor="middle">#{action.micro_batch}</text>) if width > 12
          %(<rect x="#{x}" y="#{y}" width="#{width}" height="#{ROW - 4}" fill="#{color(action)}" stroke="#555" stroke-width="0.5">) +
            %(<title>#{action}</title></rect>#{label})
        end

        def color(action)
          "hsl(#{HUES.fetch(action.kind)},60%,#{[84 - 14 * (action.stage / @timeline.ranks.size), 40].max}%)"
        end

        def escape(text)
          text.gsub("&", "&amp;").gsub("<", "&lt;")
        end
      end
    end
  end
end
