# frozen_string_literal: true

# Shows that one process, DataParallel and DistributedDataParallel make the same updates, and how
# DistributedSampler shares the examples.
#
#   ruby examples/equivalence/main.rb --no_shuffle --opt adam
#   bundle exec torchrun --standalone --nproc-per-node=2 examples/equivalence/main.rb
#
# It ends with 1 when the forms differ by more than rounding.

require_relative "../common/bundle"
require_relative "../common/command_line"
require_relative "../common/text_table"
require_relative "modes"

SHOWN = 12
# Sums in another order differ by rounding, of numbers with 16 digits.
TOLERANCE = 1e-9

options = {no_shuffle: false, epochs: 3, opt: "sgd", batch_size: 6, lr: 0.01, eps: 0.0, gpus: [0, 1], num_examples: 9, dim: 5,
           drop_last: false}
options = CommandLine.parse("ruby main.rb [options]", options, positive: %i[epochs batch_size lr num_examples dim]) do |opts|
  opts.on("--no_shuffle", "take the examples in their order") { true }
  opts.on("--epochs N", Integer, "(#{options[:epochs]})")
  opts.on("--opt NAME", %w[sgd adam], "sgd or adam (#{options[:opt]})")
  opts.on("--batch_size N", Integer, "examples of a step, of all processes together (#{options[:batch_size]})")
  opts.on("--lr RATE", Float, "learning rate of one process (#{options[:lr]})")
  opts.on("--eps EPS", Float, "Adam's; above 0 it makes the forms differ (#{options[:eps]})")
  opts.integers("--gpus LIST", "one process for each; on a machine without GPUs on the CPU (#{options[:gpus].join(",")})")
  opts.on("--num_examples N", Integer, "(#{options[:num_examples]})")
  opts.on("--dim N", Integer, "numbers in an example (#{options[:dim]})")
  opts.on("--drop_last", "leave out what cannot be shared evenly, instead of giving some examples twice")
end
CommandLine.refuse("--eps #{options[:eps]}: expected 0 or more") if options[:eps].negative?
CommandLine.refuse("--gpus #{options[:gpus].join(",")}: a device is named twice") unless options[:gpus].uniq == options[:gpus]

replicas = Ranks.launched? ? Ranks.launched_size : options[:gpus].size
if options[:batch_size] % replicas != 0
  CommandLine.refuse("--batch_size #{options[:batch_size]}: expected a multiple of the #{replicas} processes that share it")
end
if options[:drop_last] && options[:num_examples] < replicas
  CommandLine.refuse("--num_examples #{options[:num_examples]}: with --drop_last expected at least one for each of #{replicas} processes")
end

equivalence = Equivalence.new(options, replicas)
# First, as each new process runs the program up to here.
distributed = Ranks.run(replicas) { equivalence.distributed }.first
exit if Ranks.launched? && !Ranks.first_launched?

name = ->(indices) { indices.map { |index| "x#{index + 1}" }.join(" ") }
shards = equivalence.shards(0)
puts format("sharding of epoch 1: %d examples, %d %s, batch %d each, %s, %s", options[:num_examples], replicas,
  (replicas == 1) ? "process" : "processes", options[:batch_size] / replicas, options[:no_shuffle] ? "no shuffling" : "shuffled",
  options[:drop_last] ? "the rest left out" : "padded by wrapping round")
puts TextTable.format(["iteration", *Array.new(replicas) { |rank| "process #{rank}" }],
  shards.first(SHOWN).each_with_index.map { |iteration, i| [i + 1, *iteration.map(&name)] })
puts "... and #{shards.size - SHOWN} more" if shards.size > SHOWN
left_out = equivalence.left_out(0)
puts "left out: #{name.call(left_out.first(SHOWN))}#{" ..." if left_out.size > SHOWN}" if options[:drop_last] && left_out.any?
puts

outcomes = {"one process" => equivalence.one_process}
outcomes["DataParallel"] = equivalence.data_parallel
outcomes["DDP, #{replicas} processes"] = distributed

rates = if options[:opt] == "sgd"
  format("learning rate %g, DDP %g", options[:lr], options[:lr] * replicas)
else
  format("learning rate %g, eps %g", options[:lr], options[:eps])
end
puts "losses of each step, summed over the batch; #{options[:opt]}, #{rates}"
steps = outcomes.values.map(&:losses).transpose
puts TextTable.format(["step", *outcomes.keys],
  steps.first(SHOWN).each_with_index.map { |losses, i| [i + 1, *losses.map { |loss| format("%.12f", loss) }] })
puts "... and #{steps.size - SHOWN} more" if steps.size > SHOWN

first = outcomes.values.first
different = outcomes.drop(1).to_h { |form, outcome| [form, Equivalence.difference(first, outcome)] }
different.each { |form, difference| puts format("%s beside one process: losses and parameters differ by at most %.1e", form, difference) }
exit if different.values.all? { |difference| difference <= TOLERANCE }

$stdout.flush
hint = options[:eps].positive? ? "; Adam's eps #{options[:eps]} weighs more where gradients are averaged: with --eps 0 they are equal" : ""
abort "the forms differ by more than rounding (#{TOLERANCE})#{hint}"
