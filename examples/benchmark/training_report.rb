# frozen_string_literal: true

require "json"
require_relative "../common/text_table"

# What was measured, as a table and as JSON.
class TrainingReport
  HEADERS = ["Backend", "Proc Group", "Batch", "Images/s", "Loss/step", "Loss/s", "Final loss"].freeze

  # A row that could not be measured.
  Missing = Struct.new(:backend, :processes, :batch_size, :reason)

  # @return [Array<TrainingRun::Result, Missing>]
  attr_reader :rows

  # @return [Hash] the command line's options
  attr_reader :options

  def initialize(options)
    @options = options
    @rows = []
  end

  # @param result [TrainingRun::Result]
  def measured(result)
    @rows << result
  end

  def not_measured(backend, processes, batch_size, reason)
    @rows << Missing.new(backend, processes, batch_size, reason)
  end

  # @return [Array<TrainingRun::Result>] what could be measured
  def results
    @rows.grep_v(Missing)
  end

  # @return [Array<Array<String, Integer>>] the cells of {HEADERS}; a row that was not measured ends with the reason
  def cells
    @rows.map do |row|
      place = [row.backend, row.processes, row.batch_size]
      next [*place, "not available: #{row.reason}"] if row.is_a?(Missing)

      [*place, format("%.1f", row.images_per_second), format("%.5f", row.loss_reduction_per_step),
        format("%.4f", row.loss_reduction_per_second), format("%.4f", row.final_loss)]
    end
  end

  # @return [String]
  def table
    TextTable.format(HEADERS, cells)
  end

  # @return [String] the same with all digits, and the loss of each timed step
  def json
    rows = @rows.map do |row|
      place = {backend: row.backend, processes: row.processes, batch_size: row.batch_size}
      next place.merge(not_available: row.reason) if row.is_a?(Missing)

      place.merge(images_per_second: row.images_per_second, seconds: row.seconds, final_loss: row.final_loss,
        loss_reduction_per_step: row.loss_reduction_per_step, loss_reduction_per_second: row.loss_reduction_per_second,
        losses: row.losses)
    end
    JSON.pretty_generate(arch: @options[:arch], steps: @options[:steps], warmup: @options[:warmup], lr: @options[:lr],
      data: @options[:synthetic] ? "synthetic" : "MNIST", torch: Torch::VERSION, ruby: RUBY_VERSION, rows: rows)
  end
end
