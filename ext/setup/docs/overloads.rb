# frozen_string_literal: true

require "yard"

# YARD takes the first line of an @overload for its signature. Here one that is too long for a line goes on until its brackets are closed.
module OverloadsOfSeveralLines
  def parse_tag(text)
    lines = text.lines
    count = (1..lines.size).find { |n| lines.first(n).join.then { |start| start.count("(") <= start.count(")") } } || 1
    super("#{lines.first(count).map(&:strip).join(" ")}\n#{lines.drop(count).join}")
  end
end

YARD::Tags::OverloadTag.prepend(OverloadsOfSeveralLines)
