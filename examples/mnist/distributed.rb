# frozen_string_literal: true

# Trains a small convolutional network on MNIST with several processes.
#
#   ruby examples/mnist/distributed.rb --gpus 2
#   bundle exec torchrun --standalone --nproc-per-node=2 examples/mnist/distributed.rb
#
# With a GPU for each process it trains on GPUs, else on the CPU.

require_relative "../common/bundle"
require "tmpdir"
require_relative "../common/command_line"
require_relative "../common/ranks"
require_relative "trainer"

options = {
  epochs: 5, batch_size: 64, optimizer: "adadelta", lr: nil, gamma: 0.7, fused: false, log_interval: 20, gpus: nil, backend: nil, workers: 0,
  bucket_cap_mb: nil, comm_hook: nil, trace: nil, data_dir: File.join(__dir__, "data"), subset: nil,
  checkpoint: File.join(Dir.tmpdir, "mnist_ddp_checkpoint"), checkpoint_every: nil, keep: 2, resume: false
}
positive = %i[epochs batch_size lr gamma gpus log_interval bucket_cap_mb subset checkpoint_every keep]
rates = Trainer::LEARNING_RATES
hooks = Torch::Distributed::Algorithms::DDPCommHooks::NAMES.map(&:to_s)
options = CommandLine.parse("ruby distributed.rb [options]", options, positive: positive) do |opts|
  opts.on("--epochs N", Integer, "epochs in all (#{options[:epochs]})")
  opts.on("--batch-size N", Integer, "images in a batch of each process (#{options[:batch_size]})")
  opts.on("--optimizer NAME", rates.keys, "#{rates.keys.join(", ")} (#{options[:optimizer]})")
  opts.on("--lr RATE", Float, "learning rate (#{rates.map { |name, rate| "#{name} #{rate}" }.join(", ")})")
  opts.on("--gamma FACTOR", Float, "learning rate's factor after each epoch (#{options[:gamma]})")
  opts.on("--fused", "the optimizer's fused form: #{Trainer::FUSED.join(", ")}")
  opts.on("--backend NAME", "gloo or nccl (nccl with GPUs, else gloo)")
  opts.on("--gpus N", Integer, "processes to start, one a GPU where there are GPUs; torchrun decides this itself")
  opts.on("--bucket-cap-mb MIB", Float, "size of the buckets in which gradients are averaged (25, the first one 1)")
  opts.on("--comm-hook NAME", hooks, "how gradients are sent: #{hooks.join(", ")}")
  opts.on("--log-interval N", Integer, "batches between progress lines (#{options[:log_interval]})")
  opts.on("--workers N", Integer, "threads of each process that read batches ahead (#{options[:workers]})")
  opts.on("--data-dir DIR", "where the MNIST files are or shall be")
  opts.on("--subset N", Integer, "use the first N images only, for a quick look")
  opts.on("--checkpoint DIR", "folder in which the run is saved after each epoch")
  opts.on("--checkpoint-every N", Integer, "save after each N batches too")
  opts.on("--keep N", Integer, "checkpoints to keep (#{options[:keep]})")
  opts.on("--[no-]resume", "go on from the newest checkpoint if there is one")
  opts.on("--trace DIR", "write a trace of each rank there; torchtrace merges them")
end
if options[:fused] && !Trainer::FUSED.include?(options[:optimizer])
  CommandLine.refuse("--fused: #{options[:optimizer]} has no fused form; expected --optimizer #{Trainer::FUSED.join(", ")}")
end
CommandLine.refuse("--workers #{options[:workers]}: expected 0 or more") if options[:workers].negative?
if File.file?(options[:checkpoint])
  CommandLine.refuse("--checkpoint #{options[:checkpoint]}: that is a file; expected a folder, which is made if it is not there")
end

# Whoever starts first on a machine fetches the data; the others wait for it, then find it complete.
train = lambda do
  MNISTData.fetch(options[:data_dir]) { |line| puts line }
  # The group opens the trace.
  ENV["TDDP_TRACE"] = File.expand_path(options[:trace]) if options[:trace]
  Torch::Distributed.init_process_group(options[:backend])
  Trainer.new(options).run
  true
ensure
  Torch::Distributed.destroy_process_group if Torch::Distributed.initialized?
end

gpus = Ranks.gpus
processes = options[:gpus] || [gpus, 1].max
CommandLine.refuse("--gpus #{processes}: there are #{gpus} GPUs") if gpus.positive? && processes > gpus && !Ranks.launched?
abort "training failed" unless Ranks.run(processes, &train).all?
