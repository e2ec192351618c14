# frozen_string_literal: true

# Trains a small convolutional network on MNIST with several processes, on a GPU each where there are GPUs, else on the CPU.
#
#   ruby examples/mnist/distributed.rb --gpus 2
#   bundle exec torchrun --standalone --nproc-per-node=2 examples/mnist/distributed.rb

require_relative "../common/bundle"
require "tmpdir"
require_relative "../common/command_line"
require_relative "../common/mnist_data"
require_relative "../common/ranks"

SEED = 1
LEARNING_RATES = {"adadelta" => 1.0, "sgd" => 0.05, "adam" => 0.001, "adamw" => 0.001}.freeze
FUSED = %w[sgd adam adamw].freeze

class MNISTNet < Torch::NN::Module
  def initialize
    super
    @conv1 = Torch::NN::Conv2d.new(1, 32, 3, stride: 1)
    @conv2 = Torch::NN::Conv2d.new(32, 64, 3, stride: 1)
    @dropout1 = Torch::NN::Dropout.new(p: 0.25)
    @dropout2 = Torch::NN::Dropout.new(p: 0.5)
    @fc1 = Torch::NN::Linear.new(9216, 128)
    @fc2 = Torch::NN::Linear.new(128, 10)
  end

  def forward(x)
    x = Torch::NN::F.relu(@conv1.call(x))
    x = Torch::NN::F.relu(@conv2.call(x))
    x = @dropout1.call(Torch::NN::F.max_pool2d(x, 2))
    x = Torch::NN::F.relu(@fc1.call(Torch.flatten(x, start_dim: 1)))
    Torch::NN::F.log_softmax(@fc2.call(@dropout2.call(x)), 1)
  end
end

def rank = Torch::Distributed.get_rank

def world_size = Torch::Distributed.get_world_size

def ranks = "#{world_size} #{(world_size == 1) ? "rank" : "ranks"}"

def say(text)
  return unless rank.zero?

  puts text
  $stdout.flush
end

def sum_over_ranks(device, *values)
  sums = Torch.tensor(values, dtype: :float64).to(device)
  Torch::Distributed.all_reduce(sums)
  sums.cpu.to_a
end

# @return [Array] loaders of this rank's share of the training and of the test images
def loaders(options)
  data = MNISTData.load(options[:data_dir])
  data.transform_values! { |tensor| tensor[0...options[:subset]] } if options[:subset]
  train, test = %i[train test].map { |set| Torch::Utils::Data::TensorDataset.new(data[:"#{set}_images"], data[:"#{set}_labels"]) }
  sampler = Torch::Utils::Data::DistributedSampler.new(train, seed: SEED)
  # Each test image is counted by exactly one rank, so that sums over the ranks are exact.
  whole = Torch::Utils::Data::DistributedSampler.new(test, shuffle: false, pad: false)
  [Torch::Utils::Data::DistributedDataLoader.new(train, batch_size: options[:batch_size], sampler: sampler, num_workers: options[:workers]),
    Torch::Utils::Data::DistributedDataLoader.new(test, batch_size: 1000, sampler: whole)]
end

def make_optimizer(parameters, options)
  name = options[:optimizer]
  arguments = {lr: options[:lr] || LEARNING_RATES.fetch(name), fused: options[:fused] || nil, momentum: (0.9 if name == "sgd")}.compact
  {"adadelta" => Torch::Optim::Adadelta, "sgd" => Torch::Optim::SGD, "adam" => Torch::Optim::Adam, "adamw" => Torch::Optim::AdamW}
    .fetch(name).new(parameters, **arguments)
end

# Trains for an epoch, or for what is left of one that an earlier run began; yields where a checkpoint is due within it.
#
# @param resumed [Torch::Distributed::Checkpoint::Loaded, nil] the checkpoint within this epoch
# @return [Array(Float, Float)] the mean loss over all ranks, and the images per second of all together
def train(model, loader, optimizer, device, epoch, resumed, options)
  model.train
  loader.set_epoch(epoch)
  # Dropout differs by rank, and an epoch is the same whether or not the run was resumed before it.
  Torch.manual_seed(SEED + epoch * world_size + rank) unless resumed&.rng_restored
  loss_sum, seen = (resumed && rank.zero?) ? resumed.extra.values_at("loss", "images") : [0.0, 0]
  before = loader.size - (loader.sampler.remaining / options[:batch_size].to_f).ceil
  images_here = 0
  started = Process.clock_gettime(Process::CLOCK_MONOTONIC)
  loader.each.with_index(before + 1) do |(images, labels), number|
    optimizer.zero_grad
    loss = Torch::NN::F.nll_loss(model.call(images.to(device)), labels.to(device))
    loss.backward
    optimizer.step
    count = labels.size(0)
    loss_sum += loss.item * count
    seen += count
    images_here += count
    if (number % options[:log_interval]).zero?
      say format("epoch %d: %d of %d batches (%d %%), loss %.4f", epoch, number, loader.size, 100 * number / loader.size, loss.item)
    end
    due = number < loader.size && (number % (options[:checkpoint_every] || loader.size)).zero?
    yield number, sum_over_ranks(device, loss_sum, seen) if due
  end
  loss_sum, seen, images = sum_over_ranks(device, loss_sum, seen, images_here)
  [loss_sum / seen, images / (Process.clock_gettime(Process::CLOCK_MONOTONIC) - started)]
end

# Calls the module itself, without its wrapper: ranks may have unequal numbers of batches.
#
# @return [Array(Float, Float)] correct answers of all ranks, and images
def evaluate(net, loader, device)
  net.eval
  correct = Torch.no_grad { loader.each.sum { |images, labels| net.call(images.to(device)).argmax(1).eq(labels.to(device)).sum.item } }
  sum_over_ranks(device, correct, loader.sampler.size)
end

# @return [Array] the epoch to go on with, and the checkpoint if it was saved within that epoch
def resume(state, options)
  loaded = Torch::Distributed::Checkpoint.load(options[:checkpoint], **state, required: false)
  unless loaded
    say "no checkpoint in #{options[:checkpoint]}, starting afresh"
    return [1, nil]
  end
  within = loaded.extra.key?("batches")
  say "resumed after #{"batch #{loaded.extra["batches"]} of " if within}epoch #{loaded.epoch} from #{loaded.path}"
  within ? [loaded.epoch, loaded] : [loaded.epoch + 1, nil]
end

# Data parallel training is right only if every rank ends with the same parameters, bit for bit.
def compare_ranks(net)
  net.named_parameters.each do |name, parameter|
    all = Array.new(world_size) { Torch.empty_like(parameter.detach) }
    Torch::Distributed.all_gather(all, parameter.detach)
    different = all.index { |other| !Torch.equal(other, parameter.detach) }
    raise "#{name} differs between ranks #{rank} and #{different}" if different
  end
  say "parameters are equal, bit for bit, on #{ranks}"
end

def main(options)
  device = Ranks.device(options[:backend])
  train_loader, test_loader = loaders(options)
  Torch.manual_seed(SEED)
  net = MNISTNet.new.to(device)
  model = Torch::NN::Parallel::DistributedDataParallel.new(net, device_ids: Ranks.device_ids(device), bucket_cap_mb: options[:bucket_cap_mb])
  model.register_comm_hook(options[:comm_hook].to_sym) if options[:comm_hook]
  optimizer = make_optimizer(net.parameters, options)
  scheduler = Torch::Optim::LRScheduler::StepLR.new(optimizer, step_size: 1, gamma: options[:gamma])
  # What a checkpoint holds beside random numbers; the loader knows how far the epoch is.
  state = {model: net, optimizer: optimizer, scheduler: scheduler, loader: train_loader}
  save = ->(name, **more) { Torch::Distributed::Checkpoint.save(options[:checkpoint], **state, name: name, keep: options[:keep], **more) }

  first, resumed = options[:resume] ? resume(state, options) : [1, nil]
  say "#{ranks} on #{device.type}, #{train_loader.sampler.length} images a rank and epoch, batches of #{options[:batch_size]}"
  (first..options[:epochs]).each do |epoch|
    loss, speed = train(model, train_loader, optimizer, device, epoch, resumed, options) do |batches, (sum, images)|
      save.call(format("epoch-%03d-batch-%06d", epoch, batches), epoch: epoch,
        extra: {"batches" => batches, "loss" => sum, "images" => images.to_i})
    end
    resumed = nil
    correct, total = evaluate(net, test_loader, device)
    scheduler.step
    say format("epoch %d: loss %.4f, %d images/s, test accuracy %.2f %% (%d of %d)", epoch, loss, speed, 100 * correct / total, correct, total)
    save.call(format("epoch-%03d", epoch), epoch: epoch)
  end
  compare_ranks(net)
end

options = {
  epochs: 5, batch_size: 64, optimizer: "adadelta", lr: nil, gamma: 0.7, fused: false, log_interval: 20, gpus: nil, backend: nil, workers: 0,
  bucket_cap_mb: nil, comm_hook: nil, trace: nil, data_dir: File.join(__dir__, "data"), subset: nil,
  checkpoint: File.join(Dir.tmpdir, "mnist_ddp_checkpoint"), checkpoint_every: nil, keep: 2, resume: false
}
positive = %i[epochs batch_size lr gamma gpus log_interval bucket_cap_mb subset checkpoint_every keep]
hooks = Torch::Distributed::Algorithms::DDPCommHooks::NAMES.map(&:to_s)
options = CommandLine.parse("ruby distributed.rb [options]", options, positive: positive) do |opts|
  opts.on("--epochs N", Integer, "epochs in all (#{options[:epochs]})")
  opts.on("--batch-size N", Integer, "images in a batch of each process (#{options[:batch_size]})")
  opts.on("--optimizer NAME", LEARNING_RATES.keys, "#{LEARNING_RATES.keys.join(", ")} (#{options[:optimizer]})")
  opts.on("--lr RATE", Float, "learning rate (#{LEARNING_RATES.map { |name, rate| "#{name} #{rate}" }.join(", ")})")
  opts.on("--gamma FACTOR", Float, "learning rate's factor after each epoch (#{options[:gamma]})")
  opts.on("--fused", "the optimizer's fused form: #{FUSED.join(", ")}")
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
if options[:fused] && !FUSED.include?(options[:optimizer])
  CommandLine.refuse("--fused: #{options[:optimizer]} has no fused form; expected --optimizer #{FUSED.join(", ")}")
end
CommandLine.refuse("--workers #{options[:workers]}: expected 0 or more") if options[:workers].negative?
if File.file?(options[:checkpoint])
  CommandLine.refuse("--checkpoint #{options[:checkpoint]}: that is a file; expected a folder, which is made if it is not there")
end
processes = options[:gpus] || [Ranks.gpus, 1].max
CommandLine.refuse("--gpus #{processes}: there are #{Ranks.gpus} GPUs") if Ranks.gpus.positive? && processes > Ranks.gpus && !Ranks.launched?

ENV["TDDP_TRACE"] = File.expand_path(options[:trace]) if options[:trace]
trained = Ranks.run(processes) do
  # One process of a machine fetches the data, the others wait for it.
  MNISTData.fetch(options[:data_dir]) { |line| puts line }
  Torch::Distributed.init_process_group(options[:backend]) { main(options) }
  true
end
abort "training failed" unless trained.all?
