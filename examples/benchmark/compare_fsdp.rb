# frozen_string_literal: true

# Compares fully sharded training with PyTorch's on the same machine: the time of a training step, on ranks of one thread
# each, alone, with DistributedDataParallel, and sharded. The programs take turns, so that whatever else the machine does
# falls on all of them.
#
#   ruby examples/benchmark/compare_fsdp.rb --rounds 5
#   ruby examples/benchmark/compare_fsdp.rb --models gpt --ranks 2 --steps 10
#
# PYTHON names the interpreter that has torch (Debian: python3-torch and /usr/bin/python3). PyTorch shards on CPUs from 2.1 on.

require "etc"
require "rbconfig"
require_relative "../common/command_line"
require_relative "../common/text_table"
require_relative "contestant"

options = {rounds: 5, steps: nil, warmup: 4, ranks: [2], models: %w[layers gpt], fused: [false, true], limit: 300}
known = {"layers" => [32, 100], "gpt" => [8, 6]} # the batch of a rank, and the steps of a turn
given = CommandLine.parse("ruby compare_fsdp.rb [options]", {}, positive: %i[rounds steps ranks limit]) do |opts|
  opts.on("--rounds N", Integer, "turns of each program (#{options[:rounds]})")
  opts.on("--steps N", Integer, "timed steps in a turn (#{known.map { |name, (_, steps)| "#{name} #{steps}" }.join(", ")})")
  opts.on("--warmup N", Integer, "steps before them (#{options[:warmup]})")
  opts.integers("--ranks LIST", "numbers of ranks (#{options[:ranks].join(",")})")
  opts.on("--models LIST", Array, "of #{known.keys.join(", ")} (#{options[:models].join(",")})")
  opts.on("--limit S", Integer, "seconds until a program that does not answer is given up (#{options[:limit]})")
  opts.on("--quick", "one short turn of each, to see that all of it works; its figures mean nothing")
end
options.merge!(rounds: 1, steps: 2, warmup: 1, models: %w[layers]) if given[:quick]
options.merge!(given)
unknown = options[:models] - known.keys
CommandLine.refuse("--models #{unknown.first}: expected some of #{known.keys.join(", ")}") unless unknown.empty?

python = ENV.fetch("PYTHON", "/usr/bin/python3")
unless system(python, "-c", "import torch.distributed", err: File::NULL)
  abort "#{python} has no torch: install python3-torch, or name another interpreter with PYTHON=..."
end
programs = {"torch-ddp" => [RbConfig.ruby, File.join(__dir__, "fsdp_step.rb")], "PyTorch" => [python, File.join(__dir__, "fsdp_step.py")]}
ways = %w[alone ddp full_shard shard_grad_op]

begin
  contestants = programs.keys.product(options[:ranks]).to_h do |title, ranks|
    [[title, ranks], Contestant.new(title, programs[title], ranks, limit: options[:limit], kept: true)]
  end
  turns = Hash.new { |hash, key| hash[key] = [] }
  forms = {}
  options[:rounds].times do |round|
    options[:models].product(options[:ranks], ways, options[:fused]) do |model, ranks, how, fused|
      batch, steps = known.fetch(model)
      order = {model: model, batch: batch, steps: options[:steps] || steps, warmup: options[:warmup], how: how, fused: fused}
      programs.keys.rotate(round).each do |title|
        answer = contestants[[title, ranks]].do(order)
        forms[[title, how]] = answer["form"] if answer["form"]
        times = answer["milliseconds"] or next
        turns[[title, model, ranks, how, fused]] << times.sum / times.size
      end
    end
    warn "round #{round + 1} of #{options[:rounds]} done"
  end
  versions = programs.keys.map { |title| contestants[[title, options[:ranks].first]].version }
rescue Contestant::Failed => e
  abort e.message
rescue Interrupt
  abort "interrupted"
ensure
  contestants&.each_value(&:close)
end

median = ->(*key) { turns.key?(key) ? turns[key].sort[turns[key].size / 2] : nil }
ratio = ->(one, other) { (one && other) ? format("%.2f", one / other) : "-" }
puts "torch-ddp on #{versions[0]} (Ruby #{RUBY_VERSION}) and #{versions[1]} (#{forms.fetch(["PyTorch", "full_shard"], "none").sub("none", "not sharded")}), Adam, one thread a rank, " \
  "#{Etc.nprocessors} cores", "milliseconds of a step: median of #{options[:rounds]} turns, each the mean of its steps", ""
rows = options[:models].product(options[:ranks], options[:fused], ways).map do |model, ranks, fused, how|
  ours, theirs = programs.keys.map { |title| median.call(title, model, ranks, how, fused) }
  ddp = median.call("torch-ddp", model, ranks, "ddp", fused)
  [model, ranks, fused ? "fused" : "plain", how, format("%.2f", ours), theirs ? format("%.2f", theirs) : "-", ratio.call(theirs, ours), ratio.call(ours, ddp)]
end
puts TextTable.format(["Model", "Ranks", "Optimizer", "How", "torch-ddp ms", "PyTorch ms", "times as fast", "to our DDP"], rows)
