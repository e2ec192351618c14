# frozen_string_literal: true

# Has each process, forks and ranks too, write which lines of lib it ran into a file of the folder that TDDP_COVERAGE names.
# `rake coverage` loads it before all else.

require "coverage"
require "json"

module LinesReached
  ROOT = File.expand_path("..", __dir__)
  FOLDER = ENV.fetch("TDDP_COVERAGE")

  def self.write
    lines = Coverage.peek_result.filter_map { |path, counts| [path.delete_prefix("#{ROOT}/"), counts.fetch(:lines)] if path.start_with?("#{ROOT}/lib/") }
    path = File.join(FOLDER, "#{Process.pid}.json")
    File.write("#{path}.new", JSON.generate(lines.to_h))
    File.rename("#{path}.new", path)
  end

  # Ranks end by this, without exit handlers.
  module AtHardExit
    def exit!(...)
      LinesReached.write
      super
    end
  end
end

Coverage.start(lines: true)
Process.singleton_class.prepend(LinesReached::AtHardExit)
at_exit { LinesReached.write }
require "torch/distributed"
