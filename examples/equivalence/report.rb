# frozen_string_literal: true

require_relative "../common/text_table"

# What examples/equivalence/main.rb prints.
class EquivalenceReport
  SHOWN = 12
  # Sums in another order differ by rounding, of numbers with 16 digits.
  TOLERANCE = 1e-9
  private_constant :SHOWN, :TOLERANCE

  # @param equivalence [Equivalence]
  # @param options [Hash] the command line's
  def initialize(equivalence, options)
    @equivalence = equivalence
    @options = options
    @processes = equivalence.processes
  end

  # Which process gets which examples in the first epoch.
  def sharding
    puts format("sharding of epoch 1: %d examples, %d %s, batch %d each, %s, %s", @options[:num_examples], @processes,
      (@processes == 1) ? "process" : "processes", @equivalence.batch_size, @options[:no_shuffle] ? "no shuffling" : "shuffled",
      @options[:drop_last] ? "the rest left out" : "padded by wrapping round")
    rows(["iteration", *Array.new(@processes) { |rank| "process #{rank}" }], @equivalence.shards(0)) { |shard| names(shard) }
    left_out = @equivalence.left_out(0)
    puts "left out: #{names(left_out.first(SHOWN))}#{" ..." if left_out.size > SHOWN}" if left_out.any?
    puts
  end

  # @param outcome [Equivalence::Outcome] of one form of training
  def losses(outcome)
    table([outcome], format("%s, learning rate %g", @options[:opt], outcome.lr))
  end

  # @param distributed [Equivalence::Outcome] of the form with several processes; the others are trained here
  # @return [Boolean] whether they are equal but for rounding
  def comparison(distributed)
    outcomes = [@equivalence.one_process, @equivalence.data_parallel, distributed]
    table(outcomes, format("%s, learning rate %g, DDP %g", @options[:opt], outcomes.first.lr, distributed.lr))
    different = outcomes.drop(1).map { |outcome| [outcome.form, Equivalence.difference(outcomes.first, outcome)] }
    different.each { |form, part| puts format("%s beside one process: losses and parameters differ by at most %.1e", form, part) }
    return true if different.all? { |_, part| part <= TOLERANCE }

    $stdout.flush
    eps = @options[:eps]
    hint = eps.positive? ? "; Adam's eps #{eps} weighs more where gradients are averaged: with --eps 0 they are equal" : ""
    warn "the forms differ by more than rounding (#{TOLERANCE})#{hint}"
    false
  end

  private

  def table(outcomes, rates)
    puts "losses of each step, summed over the batch; #{rates}"
    rows(["step", *outcomes.map(&:form)], outcomes.map(&:losses).transpose) { |loss| format("%.12f", loss) }
  end

  def rows(header, rows, &cell)
    puts TextTable.format(header, rows.first(SHOWN).each_with_index.map { |row, i| [i + 1, *row.map(&cell)] })
    puts "... and #{rows.size - SHOWN} more" if rows.size > SHOWN
  end

  def names(indices)
    indices.map { |index| "x#{index + 1}" }.join(" ")
  end
end
