# frozen_string_literal: true

require "json"
require "optparse"
require_relative "trace/file"

module TorchDDP
  # `torchtrace`: makes one trace of those that the ranks wrote, and adds up where their time went.
  module Trace
    # The command. Exit status: 0, or 2 if the files cannot be read or written.
    class Command
      USAGE = <<~TEXT
        Usage: torchtrace [options] FOLDER|FILE...

        Adds up the times in the traces that the ranks of a job wrote (with TDDP_TRACE=FOLDER set), and makes one of them
        for chrome://tracing and ui.perfetto.dev.

      TEXT

      # On one host the ranks' clock is the same; a host is another one, too, if its clock says so.
      SAME_CLOCK_NS = 1_000_000_000

      def initialize(out: $stdout, err: $stderr)
        @out = out
        @err = err
        @json = false
      end

      # @param arguments [Array<String>] the command line
      # @return [Integer] the exit status
      def run(arguments)
        paths = options.parse(arguments)
        return 0 if @helped
        raise OptionParser::MissingArgument, "FOLDER or FILE" if paths.empty?

        ranks = read(paths)
        merge(ranks, @merged) if @merged
        @json ? print_json(ranks) : print_table(ranks)
        warn_of(ranks)
        0
      rescue OptionParser::ParseError, Unreadable => e
        @err.puts "torchtrace: #{e.message}"
        2
      end

      private

      def options
        OptionParser.new do |parser|
          parser.banner = USAGE
          parser.on("-o", "--output FILE", "Write one trace of all ranks") { |file| @merged = file }
          parser.on("-j", "--json", "Print JSON, times in microseconds") { @json = true }
          parser.on("-h", "--help", "Show this") do
            @out.puts parser
            @helped = true
          end
        end
      end

      def read(paths)
        files = paths.flat_map do |path|
          File.directory?(path) ? Dir.children(path).grep(/\Atrace_rank_\d+\.json\z/).map { |name| File.join(path, name) } : [path]
        end
        raise Unreadable, "#{paths.join(", ")}: no trace_rank_N.json there" if files.empty?

        ranks = files.map { |file| RankFile.new(file) }.sort_by(&:rank)
        twice = ranks.group_by(&:rank).values.find { |same| same.size > 1 }
        raise Unreadable, "rank #{twice[0].rank} wrote #{twice.map(&:path).join(" and ")}: give those of one run" if twice

        ranks
      end

      # Microseconds by which a rank's clock is behind the first rank's.
      def shift(rank, ranks)
        difference = rank.wall_offset_ns - ranks.first.wall_offset_ns
        (rank.host == ranks.first.host && difference.abs < SAME_CLOCK_NS) ? 0 : difference / 1000.0
      end

      def merge(ranks, path)
        fresh = "#{path}.#{Process.pid}.tmp"
        File.open(fresh, "w") do |file|
          file.write("{\"displayTimeUnit\": \"ms\", \"traceEvents\": [")
          between = "\n"
          ranks.each do |rank|
            behind = shift(rank, ranks)
            rank.each_event do |event|
              event["ts"] += behind if behind != 0 && event["ts"].is_a?(Numeric)
              file.write(between, JSON.generate(event))
              between = ",\n"
            end
          end
          file.write("\n]}\n")
        end
        File.rename(fresh, path)
      rescue SystemCallError => e
        raise Unreadable, "cannot write #{path}: #{e.message}"
      ensure
        File.delete(fresh) if File.exist?(fresh)
      end

      def row(rank)
        sums = %w[forward backward wait optimizer data communication].to_h { |kind| [kind, rank.times(kind).sum] }
        {"rank" => rank.rank, "host" => rank.host, "length" => rank.length, **sums, "hidden" => rank.hidden.sum}
      end

      def print_json(ranks)
        @out.puts JSON.pretty_generate(ranks: ranks.map { |rank| row(rank).transform_values { |value| value.is_a?(Float) ? value.round(3) : value } })
      end

      def print_table(ranks)
        rows = ranks.map { |rank| row(rank) }
        shown = %w[forward backward] + %w[wait optimizer data].select { |kind| rows.any? { |each| each[kind].positive? } } + ["communication"]
        table = [["rank", *shown, "hidden", "in all"]]
        rows.each { |each| table << [each["rank"].to_s, *shown.map { |kind| duration(each[kind]) }, share(each), duration(each["length"])] }
        widths = table.transpose.map { |column| column.map(&:size).max }
        table.each { |cells| @out.puts cells.zip(widths).map { |cell, width| cell.rjust(width) }.join("  ").rstrip }
        @out.puts "", "hidden: communication while backward computed"
        @out.puts "#{@merged} is for chrome://tracing and ui.perfetto.dev" if @merged
      end

      def share(row)
        return "-" unless row["communication"].positive?

        format("%s (%d %%)", duration(row["hidden"]), (100.0 * row["hidden"] / row["communication"]).round)
      end

      def duration(microseconds)
        case microseconds
        when 0 then "-"
        when ...1000 then format("%.0f us", microseconds)
        when ...1_000_000 then format("%.1f ms", microseconds / 1000.0)
        else format("%.2f s", microseconds / 1_000_000.0)
        end
      end

      def warn_of(ranks)
        ranks.each do |rank|
          @err.puts "torchtrace: #{rank.path}: #{rank.damaged} damaged lines left out" if rank.damaged.positive?
        end
        shown = ranks.select(&:first)
        apart = shown.find { |rank| shown.none? { |other| other != rank && meet?(rank, other, ranks) } }
        @err.puts "torchtrace: #{apart.path} seems to be of another run: none of the others was there at that time" if apart && shown.size > 1
      end

      def meet?(one, other, ranks)
        one_shift = shift(one, ranks)
        other_shift = shift(other, ranks)
        one.first + one_shift <= other.last + other_shift && other.first + other_shift <= one.last + one_shift
      end
    end
  end
end
