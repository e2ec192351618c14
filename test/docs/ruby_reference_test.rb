# frozen_string_literal: true

require "minitest/autorun"
require "set"
require "stringio"
require "yard"
require_relative "public_surface"

# The Ruby reference has all that a program can call. Objects with `@api private` are not part of it.
class RubyReferenceTest < Minitest::Test
  ROOT = PublicSurface::ROOT

  class << self
    # @return [String] what YARD prints of the sources: warnings, sums, objects without a comment
    def report
      @report ||= Dir.chdir(ROOT) do
        YARD::Logger.instance.io = StringIO.new
        YARD::CLI::Stats.run("--list-undoc", "--no-save", "--no-cache")
        YARD::Logger.instance.io.string
      end
    end
  end

  def report
    self.class.report
  end

  def test_no_comment_is_missing
    assert_empty report[/^Undocumented Objects:(.*)/m, 1].to_s.lines.grep(/\S/).join
    assert_includes report, "100.00% documented"
  end

  def test_no_warning
    assert_empty report.lines.grep(/\[(warn|error)\]/).join
  end

  # Also what is written in C, or defined while it is loaded.
  def test_what_is_there_is_known
    assert_match(/documented/, report)
    assert_operator PublicSurface.methods.size, :>, 800
    missing = PublicSurface.methods.reject do |path|
      owner = YARD::Registry.at(path[/\A[^#.]+/])
      hidden?(owner) || YARD::Registry.at(path)
    end
    assert_empty missing
  end

  def test_modules_are_known
    assert_match(/documented/, report)
    assert_empty(PublicSurface.modules.keys.reject { |name| YARD::Registry.at(name) })
  end

  private

  def hidden?(object)
    return false unless object.is_a?(YARD::CodeObjects::NamespaceObject)

    object.tag(:api)&.text == "private" || hidden?(object.namespace)
  end
end
