# frozen_string_literal: true

# Collectives measured in the manner of nccl-tests and the OSU suite, beside others' in the same run: README.md here
# says how.
#
#   ruby test/bench/collectives/collectives.rb --build build/native --operations all_reduce --max 1M

require "json"
require "optparse"
require_relative "benchmark"
require_relative "table"

# A mistake on the command line is one line.
def refuse(message)
  abort "collectives.rb: #{message} (--help lists the options)"
end

options = {build: File.join(Collectives::ROOT, "build/native"), operations: %w[all_reduce broadcast all_gather reduce_scatter all_to_all barrier],
           dtypes: %w[float32], min: 8, max: 64 << 20, factor: 4, sizes: nil, ranks: [2, 4], rounds: 5, seconds: 270.0, check: true,
           fresh: true, bind: false, hosts: 1, rate: nil, figure: "median", backend: nil, partners: nil, json: nil, chart: nil}
sizes = ->(text) { Collectives::Sizes.parse(text) or refuse("#{text}: expected bytes as 4096, 64K or 16M") }
lists = {operations: Collectives::Partner::OPERATIONS, dtypes: Collectives::Partner::DTYPES}
OptionParser.new do |opts|
  opts.banner = "Usage: ruby collectives.rb [options]"
  lists.each { |name, known| opts.on("--#{name} LIST", Array, "of #{known.join(", ")} (#{options[name].join(",")})") { |list| options[name] = list } }
  opts.on("--min BYTES", "as 4096, 64K or 16M (8)") { |text| options[:min] = sizes.call(text) }
  opts.on("--max BYTES", "(64M)") { |text| options[:max] = sizes.call(text) }
  opts.on("--factor N", Integer, "from --min on, the powers of N up to --max (4)") { |factor| options[:factor] = factor }
  opts.on("--sizes LIST", Array, "these instead") { |list| options[:sizes] = list.map(&sizes) }
  opts.on("--ranks LIST", Array, "(2,4)") { |list| options[:ranks] = list.map { |text| Integer(text, exception: false) || 0 } }
  opts.on("--hosts N", Integer, "network namespaces over which the ranks are spread, as root (1: none)") { |hosts| options[:hosts] = hosts }
  opts.on("--rate RATE", "of each host's network, in either direction, as tc has it: 10gbit (as fast as it goes)") { |rate| options[:rate] = rate }
  opts.on("--rounds N", Integer, "turns of each partner at each measurement (5)") { |rounds| options[:rounds] = rounds }
  opts.on("--seconds S", Float, "bound of all measurements together; the last round may be cut short (270)") { |bound| options[:seconds] = bound }
  opts.on("--partners LIST", Array, "of ours, gloo, mpi, floor, openmpi, pytorch, ruby, deepspeed (all)") { |list| options[:partners] = list }
  opts.on("--backend NAME", %w[gloo shm], "of ours: gloo, with shared memory beneath it, or shm alone (gloo where it is built)") do |name|
    options[:backend] = name
  end
  opts.on("--bind", "each rank's thread stays on one core, where the machine has other work; threads beside it do not") { options[:bind] = true }
  opts.on("--settled", "nobody writes the input anew before each call: it rests where the call before left it") { options[:fresh] = false }
  opts.on("--figure NAME", %w[median p10 p90 p99 min mean], "that of a turn which counts (median); p10 where the machine has other work") do |figure|
    options[:figure] = figure
  end
  opts.on("--[no-]check", "whether results are compared with what they must be (yes)") { |check| options[:check] = check }
  opts.on("--build FOLDER", "CMake's build folder, with the target bench_collectives built (build/native)") { |folder| options[:build] = File.expand_path(folder) }
  opts.on("--json FILE", "all figures of all rounds") { |file| options[:json] = file }
  opts.on("--chart FILE", "a picture: .svg, or .html with the tables") { |file| options[:chart] = file }
end.then do |parser|
  rest = parser.parse(ARGV)
  refuse("unexpected argument: #{rest.first}") unless rest.empty?
rescue OptionParser::ParseError => e
  refuse(e.message)
end

all = Collectives::Partners.all(options[:build], options[:backend])
lists[:partners] = all.map(&:name)
options[:partners] ||= lists[:partners]
lists.each do |name, known|
  unknown = options[name] - known
  refuse("--#{name} #{unknown.first}: expected some of #{known.join(", ")}") unless unknown.empty?
end
%i[min factor rounds seconds].each { |name| refuse("--#{name} #{options[name]}: expected more than #{(name == :factor) ? 1 : 0}") unless options[name] > ((name == :factor) ? 1 : 0) }
refuse("--max #{options[:max]}: expected --min #{options[:min]} or more") if options[:max] < options[:min]
refuse("--hosts #{options[:hosts]}: expected 1 to the fewest ranks, #{options[:ranks].min}") unless options[:hosts].between?(1, options[:ranks].min)
options[:ranks].each { |ranks| refuse("--ranks: expected numbers from 2 to 64, with commas between them") unless ranks.between?(2, 64) }
options[:sizes] ||= Collectives::Sizes.powers(options[:min], options[:max], options[:factor])
options[:partners] = all.select { |partner| options[:partners].include?(partner.name) }

# A signal ends it in order: all that was started is ended and removed, whatever comes meanwhile.
stopping = false
%w[INT TERM HUP].each do |name|
  trap(name) do
    unless stopping
      stopping = true
      raise Interrupt
    end
  end
end
benchmark = Collectives::Benchmark.new(options, ->(line) { warn line })
begin
  results = benchmark.run
rescue Interrupt
  benchmark.close
  abort "interrupted"
ensure
  benchmark.close
end

table = Collectives::Table.new(results)
puts table.text
if options[:json]
  File.write(options[:json], JSON.pretty_generate(results.to_h.merge(targets: Collectives::Targets.new(results).verdicts)))
end
if options[:chart]
  require_relative "chart"
  Collectives::Chart.new(results, table).write(options[:chart])
end
exit(1) if results.failed || results.wrong.any?
