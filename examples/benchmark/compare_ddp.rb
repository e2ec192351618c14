# frozen_string_literal: true

# Compares a training step of torch-ddp with PyTorch DDP's, both with two processes of one thread each over
# Gloo and the same libtorch, and each with its own single process. The programs take turns, so that
# whatever else the machine does falls on all of them.
#
#   ruby examples/benchmark/compare_ddp.rb --rounds 5 --steps 200
#
# PYTHON names the interpreter that has torch (Debian: python3-torch and /usr/bin/python3).

require "json"
require "open3"
require "optparse"
require "rbconfig"
require "socket"

options = {rounds: 5, steps: 100, warmup: 20, batch_size: 32, models: %w[mlp chain66]}
OptionParser.new do |opts|
  opts.on("--rounds N", Integer, "turns of each program (#{options[:rounds]})")
  opts.on("--steps N", Integer, "timed steps in a turn (#{options[:steps]})")
  opts.on("--warmup N", Integer, "steps before them (#{options[:warmup]})")
  opts.on("--batch-size N", Integer, "samples of each process (#{options[:batch_size]})")
  opts.on("--models LIST", Array, "mlp and chain66")
  opts.on("--json", "print the figures as JSON too")
end.parse!(into: given = {})
options.merge!(given.transform_keys { |name| name.to_s.tr("-", "_").to_sym })

# Runs one program in as many processes, and returns what rank 0 printed.
class Contestant
  attr_reader :title, :version

  def initialize(title, command, processes)
    @title = title
    @command = command
    @processes = processes
    @steps = Hash.new { |hash, model| hash[model] = [] }
  end

  def run(model, arguments)
    line = start(model, arguments).lines.grep(/\A{/).last or raise "#{@title} printed no result"
    result = JSON.parse(line)
    @version = result.fetch("version")
    @steps[model] << result.fetch("mean")
  end

  def median(model)
    sorted = @steps[model].sort
    sorted[sorted.size / 2]
  end

  private

  # The ranks are started directly, so that no launcher's time or threads differ.
  def start(model, arguments)
    shared = {"OMP_NUM_THREADS" => "1", "OPENBLAS_NUM_THREADS" => "1", "MASTER_ADDR" => "127.0.0.1",
              "MASTER_PORT" => free_port.to_s, "WORLD_SIZE" => @processes.to_s, "GLOO_SOCKET_IFNAME" => "lo"}
    threads = Array.new(@processes) do |rank|
      Thread.new { Open3.capture2e(shared.merge("RANK" => rank.to_s), *@command, model, *arguments) }
    end
    outputs = threads.map(&:value)
    failed = outputs.find { |_, status| !status.success? }
    raise "#{@title} failed:\n#{failed.first}" if failed
    outputs.first.first
  end

  def free_port
    TCPServer.open("127.0.0.1", 0) { |server| server.addr[1] }
  end
end

python = ENV.fetch("PYTHON", "/usr/bin/python3")
unless system(python, "-c", "import torch.distributed", err: File::NULL)
  abort "#{python} has no torch: install python3-torch, or name another interpreter with PYTHON=..."
end
ours = [RbConfig.ruby, File.join(__dir__, "ddp_step.rb")]
theirs = [python, File.join(__dir__, "ddp_step.py")]
contestants = [
  Contestant.new("torch-ddp, 2 processes", ours, 2),
  Contestant.new("PyTorch DDP, 2 processes", theirs, 2),
  Contestant.new("torch-rb, 1 process", ours, 1),
  Contestant.new("PyTorch, 1 process", theirs, 1)
]
arguments = options.values_at(:batch_size, :warmup, :steps).map(&:to_s)
options[:rounds].times do |round|
  options[:models].each do |model|
    contestants.each { |contestant| contestant.run(model, arguments) }
  end
  warn "round #{round + 1} of #{options[:rounds]} done"
end

puts "#{contestants[0].version} and #{contestants[1].version}, batch #{options[:batch_size]} per process, one thread each,",
  "#{options[:steps]} steps a turn, median of #{options[:rounds]} turns, milliseconds of a step", ""
puts format("%-26s%s", "", options[:models].map { |model| format("%12s", model) }.join)
contestants.each do |contestant|
  puts format("%-26s%s", contestant.title, options[:models].map { |model| format("%12.2f", contestant.median(model)) }.join)
end
ratios = options[:models].to_h { |model| [model, contestants[0].median(model) / contestants[1].median(model)] }
puts format("%-26s%s", "torch-ddp / PyTorch DDP", ratios.values.map { |ratio| format("%12.2f", ratio) }.join)
if options[:json]
  puts JSON.generate("ratio" => ratios, "milliseconds" => contestants.to_h { |contestant|
    [contestant.title, options[:models].to_h { |model| [model, contestant.median(model)] }]
  })
end
