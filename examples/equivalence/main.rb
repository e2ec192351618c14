# frozen_string_literal: true

# Trains in one of three forms, which make the same updates, and shows how DistributedSampler shares the examples.
#
#   ruby examples/equivalence/main.rb --no_shuffle --batch_size 10 --lr 1                # one process
#   ruby examples/equivalence/main.rb --no_shuffle --batch_size 10 --lr 1 --gpus 0,1     # DataParallel
#   bundle exec torchrun --standalone --nproc-per-node=2 examples/equivalence/main.rb --no_shuffle --batch_size 5 --lr 2 --gpus 0,1
#
# With --compare one run trains in all three forms, and ends with 1 when they differ by more than rounding.

require_relative "../common/bundle"
require_relative "../common/command_line"
require_relative "modes"
require_relative "report"

options = {no_shuffle: false, epochs: 3, opt: "sgd", batch_size: 10, lr: 1.0, eps: 0.0, gpus: nil, num_examples: 20, dim: 5,
           drop_last: false, compare: false}
options = CommandLine.parse("ruby main.rb [options]", options, positive: %i[epochs batch_size lr num_examples dim]) do |opts|
  opts.on("--no_shuffle", "take the examples in their order") { true }
  opts.on("--epochs N", Integer, "(#{options[:epochs]})")
  opts.on("--opt NAME", %w[sgd adam], "sgd or adam (#{options[:opt]})")
  opts.on("--batch_size N", Integer, "examples of a step of each process (#{options[:batch_size]})")
  opts.on("--lr RATE", Float, "learning rate (#{options[:lr]})")
  opts.on("--eps EPS", Float, "Adam's; above 0 it makes the forms differ (#{options[:eps]})")
  opts.integers("--gpus LIST", "several: DataParallel, or one for each process of torchrun; on the CPU where there are not so many")
  opts.on("--num_examples N", Integer, "(#{options[:num_examples]})")
  opts.on("--dim N", Integer, "numbers in an example (#{options[:dim]})")
  opts.on("--drop_last", "leave out what cannot be shared evenly, instead of giving some examples twice")
  opts.on("--compare", "train in all three forms: batch size and learning rate are one process's, DDP gets what makes it equal")
end
CommandLine.refuse("--eps #{options[:eps]}: expected 0 or more") if options[:eps].negative?

gpus = options[:gpus] || []
CommandLine.refuse("--gpus #{gpus.join(",")}: a device is named twice") unless gpus.uniq == gpus
if Ranks.launched? && gpus.any? && gpus.size < (local = Torch::Distributed.launch_variables["LOCAL_WORLD_SIZE"].to_i)
  CommandLine.refuse("--gpus #{gpus.join(",")}: expected one for each of the #{local} processes of this machine")
end
processes = Ranks.launched_size
processes = [gpus.size, 2].max if options[:compare] && !Ranks.launched?
if options[:compare] && options[:batch_size] % processes != 0
  CommandLine.refuse("--batch_size #{options[:batch_size]}: expected a multiple of the #{processes} processes that share it")
end
if options[:drop_last] && options[:num_examples] < processes
  CommandLine.refuse("--num_examples #{options[:num_examples]}: with --drop_last expected at least one for each of #{processes} processes")
end

if options[:compare]
  rate = options[:lr] * ((options[:opt] == "sgd") ? processes : 1)
  equivalence = Equivalence.new(options.merge(batch_size: options[:batch_size] / processes), processes)
  # First, as each new process runs the program up to here.
  distributed = Ranks.run(processes) { equivalence.distributed(lr: rate) }.first
else
  equivalence = Equivalence.new(options, processes)
  distributed = equivalence.distributed if Ranks.launched?
end
exit if Ranks.launched? && !Ranks.first_launched?

report = EquivalenceReport.new(equivalence, options)
report.sharding
exit report.comparison(distributed) if options[:compare]

report.losses(distributed || ((gpus.size > 1) ? equivalence.data_parallel : equivalence.one_process))
