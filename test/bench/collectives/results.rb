# frozen_string_literal: true

require "etc"

module Collectives
  # What was measured: of each measurement and series one answer a round.
  class Results
    # How many times its bytes cross the slowest link in the best case, as nccl-tests count: bus bandwidth.
    PARTS = %w[all_gather reduce_scatter all_to_all gather scatter].freeze
    FACTOR = lambda do |operation, ranks|
      next 1.0 unless operation == "all_reduce" || PARTS.include?(operation)

      ((operation == "all_reduce") ? 2 : 1) * (ranks - 1.0) / ranks
    end

    attr_reader :versions, :skipped, :options
    # A partner failed on the way.
    attr_accessor :failed

    def initialize(options)
      @options = options
      @answers = Hash.new { |hash, key| hash[key] = [] }
      @versions = {}
      @skipped = {}
      @failed = false
    end

    def add(ranks, cell, series, answer)
      @answers[[ranks, cell, series.name]] << answer
      return unless answer["loop"]

      @answers[[ranks, cell.back_to_back, series.name]] << answer.slice("bytes").merge("median" => answer["loop"], "wrong" => 0)
    end

    def version(name, text)
      @versions[name] = text
    end

    def skip(what, reason)
      @skipped[what] = reason
    end

    # @return [Array<(Integer, Cell)>] what was measured, in order
    def cells
      @answers.keys.map { |ranks, cell, _| [ranks, cell] }.uniq
    end

    # @return [Array<Series>] those with results, in the partners' order
    def series
      all = @options[:partners].flat_map(&:series)
      all.select { |series| @answers.any? { |(_, _, name), _| name == series.name } }
    end

    def answers(ranks, cell, name)
      @answers.fetch([ranks, cell, name], [])
    end

    # Microseconds of one call.
    #
    # @return [Float, nil] the median over rounds
    def time(ranks, cell, name)
      median(times(ranks, cell, name))
    end

    # How many times `slow` takes of `fast`'s time, from each round's turns, which stood side by side.
    #
    # @return [Array<Float>, nil] the median, the least and the most
    def ratio(ranks, cell, slow, fast)
      ratios = times(ranks, cell, slow).zip(times(ranks, cell, fast)).filter_map { |a, b| a / b if a && b }
      [median(ratios), *ratios.minmax] unless ratios.empty?
    end

    # @return [Array<(Float, Float)>, nil] algorithm and bus bandwidth in GB/s
    def bandwidth(ranks, cell, name)
      time = time(ranks, cell, name)
      bytes = answers(ranks, cell, name).first&.fetch("bytes")
      return if time.nil? || bytes.to_i.zero?

      algorithm = bytes / time / 1000.0
      [algorithm, algorithm * FACTOR.call(cell.operation, ranks)]
    end

    # @return [Array<String>] measurements whose results were not what they must be
    def wrong
      @answers.filter_map do |(ranks, cell, name), answers|
        count = answers.sum { |answer| answer["wrong"] }
        "#{name}: #{cell.operation} of #{cell.bytes} bytes of #{cell.dtype}, #{ranks} ranks" if count.positive?
      end
    end

    def checked
      @answers.values.flatten.count { |answer| answer["checked"] }
    end

    # For --json.
    def to_h
      options = @options.slice(:ranks, :operations, :dtypes, :sizes, :rounds, :seconds, :fresh, :check, :figure, :bind, :hosts, :rate)
      {machine: machine, options: options, versions: @versions, skipped: @skipped, wrong: wrong,
       results: @answers.map { |(ranks, cell, name), answers| row(ranks, cell, name, answers) }}
    end

    def machine
      model = File.foreach("/proc/cpuinfo").find { |line| line.start_with?("model name", "CPU part") } if File.readable?("/proc/cpuinfo")
      {cores: Etc.nprocessors, processor: model.to_s.split(":", 2).last.to_s.strip, kernel: Etc.uname[:release]}
    end

    private

    def row(ranks, cell, name, answers)
      algorithm, bus = bandwidth(ranks, cell, name)
      {ranks: ranks, operation: cell.operation, dtype: cell.dtype, bytes: cell.bytes, back_to_back: cell.loop || false, series: name, microseconds: time(ranks, cell, name),
       algorithm_gb_s: algorithm, bus_gb_s: bus, rounds: answers}
    end

    def times(ranks, cell, name)
      answers(ranks, cell, name).map { |answer| answer[@options[:figure]] || answer["median"] }
    end

    def median(values)
      return if values.empty?

      sorted = values.sort
      half = sorted.size / 2
      sorted.size.odd? ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2.0
    end
  end
end
