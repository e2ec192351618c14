# frozen_string_literal: true

require "json"
require "optparse"
require_relative "printable"
require_relative "flight_trace/dump"
require_relative "flight_trace/analysis"

# The parts of torch-ddp that run without torch.
module TorchDDP
  # `torchfrtrace`: merges what the ranks' flight recorders wrote and says who went astray.
  module FlightTrace
    # The command. Exit status: 0 nothing is wrong, 1 something is, 2 unknown.
    class Command
      USAGE = <<~TEXT
        Usage: torchfrtrace [options] FOLDER|FILE...

        Merges the flight recorders' files of a job's ranks (written with TDDP_FR_DUMP set when a group fails, an
        operation times out, or a worker gets SIGUSR1) and says who went astray.

      TEXT

      def initialize(out: $stdout, err: $stderr)
        @out = out
        @err = err
        @entries = 0
        @json = false
      end

      # @param arguments [Array<String>] the command line
      # @return [Integer] the exit status
      def run(arguments)
        paths = options.parse(arguments)
        return 0 if @helped
        raise OptionParser::MissingArgument, "FOLDER or FILE" if paths.empty?

        dumps = files(paths).map { |path| Dump.new(path) }
        analyses = group(dumps)
        @json ? print_json(dumps, analyses) : print_text(dumps, analyses)
        (analyses.any? { |analysis| analysis.findings.any? }) ? 1 : 0
      rescue OptionParser::ParseError, Unreadable => e
        @err.puts "torchfrtrace: #{e.message}"
        2
      end

      private

      def options
        OptionParser.new do |parser|
          parser.banner = USAGE
          parser.on("-j", "--json", "Print JSON") { @json = true }
          parser.on("-n", "--entries N", Integer, "Also show each rank's last N operations") do |count|
            raise OptionParser::InvalidArgument, "#{count}: expected 1 or more" if count < 1

            @entries = count
          end
          parser.on("-h", "--help", "Show this") do
            @out.puts parser
            @helped = true
          end
        end
      end

      def files(paths)
        found = paths.flat_map do |path|
          next [path] unless File.directory?(path)

          Dir.children(path).sort.map { |name| File.join(path, name) }.select { |file| trace?(file) }
        end
        raise Unreadable, "#{paths.join(", ")}: no flight recorder's file there" if found.empty?

        found
      end

      # In a folder other files may lie; one that was begun and never renamed is none of ours either.
      def trace?(file)
        File.file?(file) && !file.end_with?(".tmp") && File.open(file) { |io| io.read(1) } == "{"
      end

      def group(dumps)
        dumps.flat_map { |dump| dump.groups.values }.group_by(&:name).values.map do |views|
          twice = views.group_by(&:rank).find { |_, same| same.size > 1 }
          raise Unreadable, "rank #{twice.first} of group #{views.first.name} wrote two of these files: give those of one run" if twice

          Analysis.new(views)
        end
      end

      def print_text(dumps, analyses)
        put "#{dumps.size} of the job's ranks wrote: #{dumps.map(&:rank).sort.join(", ")}"
        analyses.each do |analysis|
          put "", "group #{analysis.name}, #{analysis.size} ranks"
          put "  nothing is wrong" if analysis.findings.empty?
          analysis.findings.each { |finding| put "  #{finding.kind}: #{finding.text}" }
          analysis.positions.each { |line| put "  #{line}" }
          print_entries(dumps, analysis) if @entries.positive?
        end
      end

      def print_entries(dumps, analysis)
        dumps.filter_map { |dump| dump.groups[analysis.name] }.sort_by(&:rank).each do |view|
          put "  rank #{view.rank}:"
          view.entries.last(@entries).each { |entry| put "    #{entry.state.ljust(9)} #{entry}" }
        end
      end

      # What ranks wrote on any host.
      def put(*lines)
        @out.puts(lines.map { |line| TorchDDP.printable(line) })
      end

      def print_json(dumps, analyses)
        groups = analyses.map do |analysis|
          {name: analysis.name, size: analysis.size, findings: analysis.findings.map(&:to_h), positions: analysis.positions}
        end
        @out.puts JSON.pretty_generate(ranks: dumps.map(&:rank).sort, groups: groups)
      end
    end
  end
end
