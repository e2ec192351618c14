# frozen_string_literal: true

# Compares pipelines and tensor parallel training with PyTorch's on the same machine: the time of a training step of eight layers
# Linear(512) with ReLU by Adam, on ranks of one thread each, and alone. The programs take turns, so that whatever else the machine does falls on
# all of them.
#
#   ruby examples/benchmark/compare_parallel.rb --rounds 5
#   ruby examples/benchmark/compare_parallel.rb --schedules alone,tensor --batch 32
#
# PYTHON names the interpreter that has torch (Debian: python3-torch and /usr/bin/python3): PyTorch 2.4 and newer has pipelines. A
# program that fails or does not answer, as PyTorch 2.6's 1F1B over gloo, is left out.

require "etc"
require "rbconfig"
require_relative "../common/command_line"
require_relative "../common/text_table"
require_relative "contestant"

known = %w[alone tensor gpipe 1f1b interleaved zero_bubble]
defaults = {rounds: 5, steps: 40, warmup: 5, ranks: 2, batch: 256, micro_batches: 8, schedules: %w[alone gpipe 1f1b], fused: false, limit: 60}
counts = %i[rounds steps ranks batch micro_batches limit]
options = CommandLine.parse("ruby compare_parallel.rb [options]", defaults, positive: counts) do |opts|
  opts.on("--rounds N", Integer, "turns of each program (#{defaults[:rounds]})")
  opts.on("--steps N", Integer, "timed steps in a turn (#{defaults[:steps]})")
  opts.on("--warmup N", Integer, "steps before them (#{defaults[:warmup]})")
  opts.on("--ranks N", Integer, "ranks of the pipeline (#{defaults[:ranks]})")
  opts.on("--batch N", Integer, "rows of the batch (#{defaults[:batch]})")
  opts.on("--micro-batches N", Integer, "parts of it (#{defaults[:micro_batches]})")
  opts.on("--schedules LIST", Array, "of #{known.join(", ")} (#{defaults[:schedules].join(",")})")
  opts.on("--fused", "with fused optimizers, on both sides")
  opts.on("--limit S", Integer, "seconds until a program that does not answer is given up (#{defaults[:limit]})")
  opts.on("--quick", "one short turn of each, to see that all of it works; its figures mean nothing")
end
options.merge!(rounds: 1, steps: 2, warmup: 1) if options[:quick]
unknown = options[:schedules] - known
CommandLine.refuse("--schedules #{unknown.first}: expected some of #{known.join(", ")}") unless unknown.empty?

python = ENV.fetch("PYTHON", "/usr/bin/python3")
programs = {"torch-ddp" => [RbConfig.ruby, File.join(__dir__, "parallel_step.rb")]}
if system(python, "-c", "import torch.distributed.pipelining", err: File::NULL)
  programs["PyTorch"] = [python, File.join(__dir__, "parallel_step.py")]
else
  warn "#{python} has no torch with pipelines: install python3-torch 2.4 or newer, or name another interpreter with PYTHON=..."
end

turns = Hash.new { |hash, key| hash[key] = [] }
answers = {}
contestants = {}
begin
  # Each has processes of its own, so that one that hangs takes no other with it.
  programs.keys.product(options[:schedules]) do |title, schedule|
    contestants[[title, schedule]] = Contestant.new(title, programs[title], options[:ranks], limit: options[:limit], kept: true)
  end
  versions = contestants.values.to_h { |each| [each.title, each.version] }
  order = options.slice(:batch, :micro_batches, :fused, :warmup, :steps)
  options[:rounds].times do |round|
    options[:schedules].product(programs.keys.rotate(round)) do |schedule, title|
      contestant = contestants[[title, schedule]] or next
      answer = contestant.do(order.merge(schedule: schedule))
      answers[[title, schedule]] = answer
      turns[[title, schedule]] << answer["milliseconds"].sum / answer["milliseconds"].size
    rescue Contestant::Failed => e
      warn "#{schedule}: #{e.message}"
      contestants.delete([title, schedule]).close
    end
    warn "round #{round + 1} of #{options[:rounds]} done"
  end
rescue Contestant::Failed => e
  abort e.message
rescue Interrupt
  abort "interrupted"
ensure
  contestants.each_value(&:close)
end

median = ->(title, schedule) { turns.key?([title, schedule]) ? turns[[title, schedule]].sort[turns[[title, schedule]].size / 2] : nil }
shown = ->(value, format = "%.2f") { value ? format(format, value) : "-" }
puts "#{versions.values.join(" and ")} (Ruby #{RUBY_VERSION}), #{"fused " if options[:fused]}Adam, batch #{options[:batch]}, #{options[:micro_batches]} micro-batches, " \
  "#{options[:ranks]} ranks of one thread, #{Etc.nprocessors} cores",
  "milliseconds of a step: median of #{options[:rounds]} turns, each the mean of its steps", ""
rows = options[:schedules].map do |schedule|
  ours, theirs = %w[torch-ddp PyTorch].map { |title| median.call(title, schedule) }
  answer = answers[["torch-ddp", schedule]] || {}
  [schedule, shown.call(ours), shown.call(theirs), shown.call((theirs / ours if ours && theirs)),
    *%w[bubble theory].map { |name| shown.call(answer[name] && 100 * answer[name], "%.1f %%") }]
end
puts TextTable.format(["Schedule", "torch-ddp ms", "PyTorch ms", "times as fast", "bubble", "in theory"], rows)
