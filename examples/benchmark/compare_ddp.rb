# frozen_string_literal: true

# Compares torch-ddp with PyTorch DDP on the same machine and libtorch: the time of a training step on one and on two
# ranks of one thread each, with the plain and the fused optimizer, and the memory that gradients take. The
# programs take turns, so that whatever else the machine does falls on all of them.
#
#   ruby examples/benchmark/compare_ddp.rb --rounds 5
#   ruby examples/benchmark/compare_ddp.rb --quick
#
# PYTHON names the interpreter that has torch (Debian: python3-torch and /usr/bin/python3).

require "etc"
require "json"
require "rbconfig"
require_relative "../common/command_line"
require_relative "comparison"

options = {rounds: 5, seconds: 1.5, steps: nil, warmup: 5, batch_size: nil, batch_sizes: [32, 128], ranks: [1, 2],
           models: %w[cnn mlp chain66], memory_models: %w[cnn mlp chain66 wide], optimizer: "sgd", times: true, memory: true, quick: false,
           json: nil, limit: 300}
usage = "ruby compare_ddp.rb [options]"
positive = %i[rounds seconds steps batch_size batch_sizes limit]
known = %w[cnn mlp chain66 wide]
given = CommandLine.parse(usage, {}, positive: positive) do |opts|
  opts.on("--rounds N", Integer, "turns of each program (#{options[:rounds]})")
  opts.on("--seconds S", Float, "about how long a turn lasts (#{options[:seconds]})")
  opts.on("--steps N", Integer, "timed steps in a turn, instead of --seconds")
  opts.on("--warmup N", Integer, "steps before them (#{options[:warmup]})")
  opts.integers("--batch-sizes LIST", "samples of each rank (#{options[:batch_sizes].join(",")})")
  opts.on("--batch-size N", Integer, "one of them")
  opts.on("--models LIST", Array, "of #{known.join(", ")} (#{options[:models].join(",")})")
  opts.on("--memory-models LIST", Array, "those whose memory is measured (#{options[:memory_models].join(",")})")
  opts.on("--[no-]memory", "whether memory is measured (yes)")
  opts.on("--[no-]times", "whether steps are timed (yes)")
  opts.on("--optimizer NAME", %w[sgd momentum adam], "sgd, momentum (SGD with it) or adam (#{options[:optimizer]})")
  opts.on("--limit S", Integer, "seconds until a program that does not answer is given up (#{options[:limit]})")
  opts.on("--quick", "one short turn of each, to see that all of it works; its figures mean nothing")
  opts.on("--json [FILE]", "write the figures there; without FILE, print them")
  opts.on("--chart FILE", /.+\.svg/, "draw images per second on the most ranks there: FILE.svg")
end
options.merge!(rounds: 1, steps: 3, warmup: 1, batch_sizes: [32], memory_models: %w[mlp]) if given[:quick]
options.merge!(given)
options[:batch_sizes] = [options[:batch_size]] if options[:batch_size]
CommandLine.refuse("--warmup #{options[:warmup]}: expected 0 or more") if options[:warmup].negative?
%i[models memory_models].each do |name|
  unknown = options[name] - known
  CommandLine.refuse("--#{name.to_s.tr("_", "-")} #{unknown.first}: expected some of #{known.join(", ")}") unless unknown.empty?
end

CommandLine.refuse("--chart shows times: expected no --no-times") if options[:chart] && !options[:times]

python = ENV.fetch("PYTHON", "/usr/bin/python3")
unless system(python, "-c", "import torch.distributed", err: File::NULL)
  abort "#{python} has no torch: install python3-torch, or name another interpreter with PYTHON=..."
end
programs = {"torch-ddp" => [RbConfig.ruby, File.join(__dir__, "ddp_step.rb")], "PyTorch" => [python, File.join(__dir__, "ddp_step.py")]}

# Progress goes to standard error; the figures alone go to standard output.
say = ->(line) { warn line }
begin
  comparison = Comparison.new(programs, options, say)
  comparison.time_steps if options[:times]
  comparison.measure_memory if options[:memory]
rescue Contestant::Failed => e
  abort e.message
rescue Interrupt
  abort "interrupted"
ensure
  comparison&.close
end

puts comparison.heading
puts "", comparison.step_table, "", comparison.ratio_table, "", comparison.goal_table if options[:times]
puts "", comparison.memory_table if options[:memory]
if options[:chart]
  require_relative "../common/bundle"
  require_relative "comparison_chart"
  File.write(options[:chart], ComparisonChart.new(comparison.figures, options[:ranks].max).svg)
end
if options.key?(:json) && given.key?(:json)
  text = JSON.pretty_generate(comparison.figures)
  options[:json] ? File.write(options[:json], "#{text}\n") : puts("", text)
end
