# frozen_string_literal: true

require "optparse"

# The command line of an example: options with defaults, in dashes or underscores; a mistake is one line.
module CommandLine
  IntegerList = Class.new
  private_constant :IntegerList

  # What is declared with {integers} is a list of whole numbers with commas between them.
  class Parser < OptionParser
    def initialize(*)
      super
      accept(IntegerList, /\A\d+(?:,\d+)*\z/) { |text, *| text.split(",").map(&:to_i) }
    end

    # @param words [Array<String>] what `on` takes
    def integers(name, *words)
      on(name, IntegerList, *words)
    end
  end

  module_function

  # @param usage [String] the first line of --help
  # @param defaults [Hash{Symbol => Object}] every option, by its name with underscores
  # @param positive [Array<Symbol>] options whose values must be 1 or more, also each one of a list
  # @param arguments [Array<String>]
  # @yieldparam parser [Parser] to declare options on
  # @return [Hash{Symbol => Object}] the defaults with what was given
  def parse(usage, defaults, positive: [], arguments: ARGV)
    parser = Parser.new
    parser.banner = "Usage: #{usage}"
    yield parser
    given = {}
    rest = parser.parse(arguments, into: given)
    refuse("unexpected argument: #{rest.join(" ")}") unless rest.empty?
    options = defaults.merge(given.transform_keys { |name| name.to_s.tr("-", "_").to_sym })
    check(options, positive)
    options
  rescue OptionParser::ParseError => e
    refuse(e.message)
  end

  # Ends the program with one line.
  #
  # @param message [String] the value, and what was expected
  def refuse(message)
    abort "#{File.basename($PROGRAM_NAME)}: #{message} (--help lists the options)"
  end

  def check(options, positive)
    positive.each do |name|
      wrong = Array(options[name]).find { |value| !value.positive? } or next
      refuse("--#{name.to_s.tr("_", "-")} #{wrong}: expected #{wrong.is_a?(Float) ? "a number above 0" : "a number from 1 up"}")
    end
  end

  private_class_method :check
end
