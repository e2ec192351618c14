# frozen_string_literal: true

# Progress of an epoch: a bar on a terminal, else a plain line every so many batches.
class Progress
  # @param every [Integer] batches between two plain lines
  # @param shown [Boolean] only one rank should speak
  # @param done [Integer] batches that an earlier run did
  def initialize(title, total, every, shown:, done: 0)
    @title = title
    @total = total
    @every = every
    @done = done
    @shown = shown
    @bar = terminal_bar if shown && $stdout.tty?
  end

  def advance(note)
    @done += 1
    if @bar
      @bar.title = "#{@title}, #{note}"
      @bar.increment
    elsif @shown && (@done % @every).zero?
      puts format("%s: %d of %d batches (%d %%), %s", @title, @done, @total, 100 * @done / @total, note)
      $stdout.flush
    end
  end

  def finish
    @bar&.finish
  end

  private

  def terminal_bar
    require "ruby-progressbar"
    ProgressBar.create(title: @title, total: @total, starting_at: @done, format: "%t |%B| %c/%C %e", remove_mark: " ")
  end
end
