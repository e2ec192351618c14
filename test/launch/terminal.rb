# frozen_string_literal: true

require "io/console"
require "pty"

# The screen of a terminal: just the sequences that torchrun and simple programs use; any other is an error.
class Terminal
  attr_reader :rows, :columns, :text

  def initialize(rows, columns)
    @rows = rows
    @columns = columns
    @screen = Array.new(rows) { [] }
    @row = @column = 0
    @saved = [0, 0]
    @scrolled = []
    @rest = +""
    @text = +""
  end

  # What has left the screen at its top, and what is on it.
  def lines
    (@scrolled + @screen).map { |cells| cells.map { |cell| cell || " " }.join.rstrip }
  end

  # Lines without the empty ones at the end.
  def shown
    lines.reverse.drop_while(&:empty?).reverse
  end

  # Where the next character goes: the line among `lines`, and the column.
  def cursor
    [@scrolled.size + @row, @column]
  end

  TOKEN = /\e\[[0-9;]*[A-Za-z]|\e[78D]|\r|\n|\u0007|[^\e\r\n\u0007]/
  PARTIAL = /\A\e(?:\[[0-9;]*)?\z/

  def feed(bytes)
    @text << bytes
    @rest << bytes.dup.force_encoding("UTF-8")
    until @rest.empty? || @rest.match?(PARTIAL) || !@rest.valid_encoding?
      token = @rest[/\A(?:#{TOKEN})/o] or raise "not known to this terminal: #{@rest[0, 20].inspect}"
      @rest = @rest[token.size..]
      act(token)
    end
  end

  private

  def act(token)
    case token
    when "\r" then @column = 0
    when "\n", "\eD" then down
    when "\e7" then @saved = [@row, @column]
    when "\e8" then @row, @column = @saved
    when /\A\e\[(\d*)A/ then @row = [@row - count($1), 0].max
    when /\A\e\[(\d*)B/ then @row = [@row + count($1), @rows - 1].min
    when "\e[K" then @screen[@row] = @screen[@row].take(@column)
    when "\e[J" then erase_below
    when /\A\e\[[0-9;]*m/, "\a" then nil
    when /\A\e/ then raise "not known to this terminal: #{token.inspect}"
    else put(token)
    end
  end

  def count(digits)
    [digits.to_i, 1].max
  end

  def erase_below
    @screen[@row] = @screen[@row].take(@column)
    (@row + 1...@rows).each { |row| @screen[row] = [] }
  end

  def down
    return @row += 1 if @row < @rows - 1

    @scrolled << @screen.shift
    @screen << []
  end

  def put(character)
    if @column == @columns
      @column = 0
      down
    end
    @screen[@row][@column] = character
    @column += 1
  end
end
