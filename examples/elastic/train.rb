# frozen_string_literal: true

# Training that nodes may join and leave while it runs.
#
#   bundle exec torchrun --standalone --nproc-per-node=2 examples/elastic/train.rb
#
# On several machines, from one to three of them at a time:
#
#   bundle exec torchrun --nnodes=1:3 --rdzv-backend=c10d --rdzv-endpoint=a:29400 --rdzv-id=spirals \
#     examples/elastic/train.rb --checkpoint /a/folder/that/all/see
#
# torchrun starts the workers anew when nodes come or go: what makes that cheap is a checkpoint after each few batches.

require_relative "../common/bundle"
require "tmpdir"
require_relative "../common/command_line"
require_relative "../common/ranks"
require_relative "spirals"

# A network that separates two spirals, trained by as many ranks as there are now.
class ElasticTraining
  SEED = 1

  # @param options [Hash] the command line's options
  def initialize(options)
    @options = options
    @rank = Torch::Distributed.get_rank
    @world_size = Torch::Distributed.get_world_size
    Torch.manual_seed(SEED)
    @net = Spirals.net
    @model = Torch::NN::Parallel::DistributedDataParallel.new(@net)
    @optimizer = Torch::Optim::Adam.new(@net.parameters, lr: options[:lr], fused: true)
    data = Torch::Utils::Data::TensorDataset.new(*Spirals.points(options[:points], seed: SEED))
    @sampler = Torch::Utils::Data::DistributedSampler.new(data, seed: SEED)
    # The batch of all ranks together stays the same, so training goes the same way with fewer ranks or more.
    @loader = Torch::Utils::Data::DistributedDataLoader.new(data, batch_size: (options[:batch_size].to_f / @world_size).ceil, sampler: @sampler)
  end

  def run
    first = resume
    (first..@options[:epochs]).each do |epoch|
      say format("epoch %d: loss %.4f, %d points, %s", epoch, *train_epoch(epoch), ranks(@world_size))
      @step = @sum = @seen = 0
      save(epoch)
    end
    say format("accuracy %.1f %%", accuracy * 100)
  end

  private

  # Everything that a worker needs to go on where others stopped. The loader knows how far the epoch is, and shares what
  # is left of it among the ranks that there are now.
  def state
    {model: @net, optimizer: @optimizer, loader: @loader}
  end

  # @return [Integer] the epoch to go on with
  def resume
    loaded = Torch::Distributed::Checkpoint.load(@options[:checkpoint], **state, required: false)
    @step, @sum, @seen = loaded ? loaded.extra.values_at("step", "sum", "seen") : [0, 0.0, 0]
    say "#{ranks(@world_size)}, restart #{ENV.fetch("TORCHELASTIC_RESTART_COUNT", "0")}: " + origin(loaded)
    loaded ? loaded.extra["next_epoch"] : 1
  end

  def origin(loaded)
    return "starting afresh" unless loaded

    "going on after #{@seen} points of epoch #{loaded.extra["next_epoch"]}, saved by #{ranks(loaded.world_size)}"
  end

  # @return [Array(Float, Integer)] the mean loss, and the points that all ranks have seen in this epoch, also before a restart
  def train_epoch(epoch)
    @loader.set_epoch(epoch)
    @loader.each do |points, labels|
      @optimizer.zero_grad
      loss = Torch::NN::F.cross_entropy(@model.call(points), labels)
      loss.backward
      @optimizer.step
      sleep @options[:pause]
      @step += 1
      count(loss.item, labels.size(0))
      save(epoch, within: true) if (@step % @options[:checkpoint_every]).zero?
    end
    [@sum / @seen, @seen]
  end

  def count(loss, points)
    sums = Torch.tensor([loss * points, points], dtype: :float64)
    Torch::Distributed.all_reduce(sums)
    @sum += sums[0].item
    @seen += sums[1].item.to_i
  end

  def save(epoch, within: false)
    Torch::Distributed::Checkpoint.save(@options[:checkpoint], **state, name: format("epoch-%04d-step-%06d", within ? epoch : epoch + 1, @step),
      epoch: epoch, extra: {"next_epoch" => within ? epoch : epoch + 1, "step" => @step, "sum" => @sum, "seen" => @seen}, keep: 2)
  end

  def accuracy
    points, labels = Spirals.points(@options[:points], seed: SEED + 1)
    Torch.no_grad { @net.call(points).argmax(1).eq(labels).sum.item.to_f / labels.size(0) }
  end

  def ranks(count)
    (count == 1) ? "1 rank" : "#{count} ranks"
  end

  def say(text)
    puts text if @rank.zero?
    $stdout.flush
  end
end

options = {epochs: 20, points: 2000, batch_size: 64, lr: 0.01, checkpoint: File.join(Dir.tmpdir, "elastic_checkpoint"), checkpoint_every: 10, pause: 0.0}
positive = %i[epochs points batch_size lr checkpoint_every]
options = CommandLine.parse("torchrun [options of torchrun] train.rb [options]", options, positive: positive) do |opts|
  opts.on("--epochs N", Integer, "epochs in all (#{options[:epochs]})")
  opts.on("--points N", Integer, "points of each epoch (#{options[:points]})")
  opts.on("--batch-size N", Integer, "points in a batch of all ranks together (#{options[:batch_size]})")
  opts.on("--lr RATE", Float, "learning rate (#{options[:lr]})")
  opts.on("--checkpoint DIR", "folder of the checkpoints, seen by all ranks; training goes on from the newest")
  opts.on("--checkpoint-every N", Integer, "batches between two checkpoints (#{options[:checkpoint_every]})")
  opts.on("--pause SECONDS", Float, "wait after each batch, to have time for trying things")
end
CommandLine.refuse("--pause #{options[:pause]}: expected 0 or more") if options[:pause].negative?

train = lambda do
  Torch::Distributed.init_process_group("gloo")
  ElasticTraining.new(options).run
  true
ensure
  Torch::Distributed.destroy_process_group if Torch::Distributed.initialized?
end
abort "training failed" unless Ranks.run(1, &train).all?
