# frozen_string_literal: true

require "json"
require "optparse"
require_relative "console"
require_relative "../../lib/torch/distributed/pipelining/orders"
require_relative "../../lib/torch/distributed/pipelining/timeline"

module Setup
  # Draws a schedule of a pipeline as SVG: as it is planned, or as a trace (TDDP_TRACE) has it.
  class PipelineDrawing
    Pipelining = Torch::Distributed::Pipelining
    SCHEDULES = {
      "gpipe" => ->(ranks, each, count) { Pipelining::Orders.fill_drain(ranks, ranks * each, count) },
      "1f1b" => ->(ranks, each, count) { Pipelining::Orders.one_forward_one_backward(ranks, ranks * each, count) },
      "interleaved" => ->(ranks, each, count) { Pipelining::Orders.one_forward_one_backward(ranks, ranks * each, count, ahead: 2) },
      "zero_bubble" => ->(ranks, each, count) { Pipelining::Orders.one_forward_one_backward(ranks, ranks * each, count, split: true) }
    }.freeze
    # Both parts of a backward together take as long as it.
    TIMES = {F: 1, B: 2, I: 1, W: 1}.freeze

    # @param arguments [Array<String>] options
    # @return [String] the file
    # @raise [Failure] naming the option that is wrong
    def run(*arguments)
      options = parse(arguments)
      timeline, title = options[:trace] ? measured(options[:trace]) : planned(options)
      File.write(options[:output], timeline.to_svg(title))
      Console.say "#{options[:output]}: #{title}, bubble #{format("%.1f", 100 * timeline.bubble)} %"
      options[:output]
    rescue OptionParser::ParseError, ArgumentError => e
      raise Failure, e.message
    end

    private

    def parse(arguments)
      options = {schedule: "1f1b", ranks: 4, micro_batches: 8, stages_per_rank: nil, output: "pipeline.svg", trace: nil}
      rest = OptionParser.new do |opts|
        opts.banner = "Usage: rake pipeline:svg ARGS=\"[options]\""
        opts.on("--schedule NAME", SCHEDULES.keys)
        %w[--ranks --micro-batches --stages-per-rank].each { |name| opts.on("#{name} N", OptionParser::DecimalInteger) }
        opts.on("--trace FOLDER", "instead: the last step that a trace has")
        opts.on("--output FILE")
      end.parse(arguments, into: (given = {}))
      raise ArgumentError, "unexpected argument: #{rest.first}" unless rest.empty?

      options.merge!(given.transform_keys { |name| name.to_s.tr("-", "_").to_sym })
      options[:stages_per_rank] ||= (options[:schedule] == "interleaved") ? 2 : 1
      wrong = %i[ranks micro_batches stages_per_rank].find { |name| options[name] < 1 }
      raise ArgumentError, "--#{wrong.to_s.tr("_", "-")} #{options[wrong]}: expected a number from 1 up" if wrong

      options
    end

    def planned(options)
      ranks, each, count = options.values_at(:ranks, :stages_per_rank, :micro_batches)
      plan = SCHEDULES.fetch(options[:schedule]).call(ranks, each, count)
      title = "#{options[:schedule]}, #{ranks} ranks#{" of #{each} stages" if each > 1}, #{count} micro-batches"
      [Pipelining::Timeline.of(plan) { |action| TIMES.fetch(action.kind) }, title]
    end

    def measured(folder)
      files = Dir[File.join(folder, "trace_rank_*.json")].sort_by { |file| file[/\d+(?=\.json)/].to_i }
      raise ArgumentError, "--trace #{folder}: expected a folder with files trace_rank_*.json" if files.empty?

      rows = files.map { |file| last_step(JSON.parse(File.read(file))) }
      raise ArgumentError, "--trace #{folder}: a rank shows no step of a pipeline" if rows.any?(&:empty?)

      [Pipelining::Timeline.new(rows), "the last step in #{folder}"]
    end

    # A step begins with the first micro-batch's forward of the first stage that a rank has.
    def last_step(events)
      spans = events.select { |event| event["ph"] == "X" && event["cat"] == "pipeline" }.sort_by { |event| event["ts"] }.map do |event|
        action = Pipelining::Action.parse("#{event["args"]["stage"]}#{event["name"]}")
        Pipelining::Timeline::Span.new(action, event["ts"], event["ts"] + event["dur"])
      end
      first = spans.map { |span| span.action.stage }.min
      spans.drop(spans.rindex { |span| span.action.to_s == "#{first}F0" } || 0)
    end
  end
end
