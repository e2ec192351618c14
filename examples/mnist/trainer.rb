# frozen_string_literal: true

require_relative "../common/ranks"
require_relative "mnist_data"
require_relative "model"
require_relative "progress"

# One rank's training on MNIST: its shard of the data, the epochs, the evaluation over all ranks, and checkpoints from
# which the run goes on, also in the midst of an epoch, as if it had not stopped.
class Trainer
  SEED = 1
  LEARNING_RATES = {"adadelta" => 1.0, "sgd" => 0.05, "adam" => 0.001, "adamw" => 0.001}.freeze
  FUSED = %w[sgd adam adamw].freeze

  # @param options [Hash] the command line's options, see distributed.rb
  def initialize(options)
    @options = options
    @rank = Torch::Distributed.get_rank
    @world_size = Torch::Distributed.get_world_size
    @device = Ranks.device(options[:backend])
    load_data
    Torch.manual_seed(SEED)
    @net = MNISTNet.new.to(@device)
    @model = Torch::NN::Parallel::DistributedDataParallel.new(@net, device_ids: Ranks.device_ids(@device), bucket_cap_mb: options[:bucket_cap_mb])
    @model.register_comm_hook(options[:comm_hook].to_sym) if options[:comm_hook]
    @optimizer = optimizer(@net.parameters)
    @scheduler = Torch::Optim::LRScheduler::StepLR.new(@optimizer, step_size: 1, gamma: options[:gamma])
  end

  def run
    first, @done = resume
    say format("%d %s on %s, %d images a rank and epoch, batches of %d", @world_size, (@world_size == 1) ? "rank" : "ranks",
      @device.type, @sampler.length, @options[:batch_size])
    (first..@options[:epochs]).each do |epoch|
      loss, images_per_second = train_epoch(epoch)
      correct, total = evaluate
      @scheduler.step
      say format("epoch %d: loss %.4f, %d images/s, test accuracy %.2f %% (%d of %d)", epoch, loss, images_per_second,
        100.0 * correct / total, correct, total)
      save(epoch)
    end
    compare_ranks
  end

  private

  def load_data
    data = MNISTData.load(@options[:data_dir])
    data.transform_values! { |tensor| tensor[0...@options[:subset]] } if @options[:subset]
    train, test = %i[train test].map { |set| Torch::Utils::Data::TensorDataset.new(data[:"#{set}_images"], data[:"#{set}_labels"]) }
    @sampler = Torch::Utils::Data::DistributedSampler.new(train, seed: SEED)
    @loader = Torch::Utils::Data::DistributedDataLoader.new(train, batch_size: @options[:batch_size], sampler: @sampler,
      num_workers: @options[:workers])
    # Every test image is looked at by exactly one rank, so the sums over the ranks are exact.
    sampler = Torch::Utils::Data::DistributedSampler.new(test, shuffle: false, pad: false)
    @test_loader = Torch::Utils::Data::DistributedDataLoader.new(test, batch_size: 1000, sampler: sampler)
  end

  def optimizer(parameters)
    options = {lr: @options[:lr] || LEARNING_RATES.fetch(@options[:optimizer])}
    options[:fused] = true if @options[:fused]
    case @options[:optimizer]
    when "adadelta" then Torch::Optim::Adadelta.new(parameters, **options)
    when "sgd" then Torch::Optim::SGD.new(parameters, momentum: 0.9, **options)
    when "adam" then Torch::Optim::Adam.new(parameters, **options)
    when "adamw" then Torch::Optim::AdamW.new(parameters, **options)
    end
  end

  # @return [Array(Float, Float)] the mean loss over all ranks, and images per second of all together
  def train_epoch(epoch)
    @model.train
    @loader.set_epoch(epoch)
    # Dropout differs by rank, and an epoch is the same whether the run was resumed before it or not.
    Torch.manual_seed(SEED + epoch * @world_size + @rank) unless @done["rng"]
    sum, seen = @done.values_at("loss", "images")
    before = @loader.size - batches_of(@sampler.remaining)
    progress = Progress.new("epoch #{epoch}", @loader.size, @options[:log_interval], shown: @rank.zero?, done: before)
    images_here = 0
    started = now
    @loader.each.with_index(before + 1) do |(images, labels), number|
      loss = train_batch(images.to(@device), labels.to(@device))
      sum += loss * labels.size(0)
      seen += labels.size(0)
      images_here += labels.size(0)
      progress.advance("loss #{format("%.4f", loss)}")
      save_within(epoch, number, sum, seen) if number < @loader.size && (number % (@options[:checkpoint_every] || @loader.size)).zero?
    end
    progress.finish
    @done = FRESH
    loss, images, now_seen = sum_over_ranks(sum, seen, images_here)
    [loss / images, now_seen / (now - started)]
  end

  def batches_of(images)
    (images + @options[:batch_size] - 1) / @options[:batch_size]
  end

  def train_batch(images, labels)
    @optimizer.zero_grad
    loss = Torch::NN::F.nll_loss(@model.call(images), labels)
    loss.backward
    @optimizer.step
    loss.item
  end

  # The module itself is called, as ranks may have unequal numbers of batches.
  #
  # @return [Array(Integer, Integer)] right answers and images
  def evaluate
    @model.eval
    correct = Torch.no_grad do
      @test_loader.each.sum { |images, labels| @net.call(images.to(@device)).argmax(1).eq(labels.to(@device)).sum.item }
    end
    sum_over_ranks(correct, @test_loader.sampler.size).map(&:to_i)
  end

  def sum_over_ranks(*values)
    sums = Torch.tensor(values, dtype: :float64).to(@device)
    Torch::Distributed.all_reduce(sums)
    sums.cpu.to_a
  end

  # What a checkpoint restores beside the random numbers. The loader knows how far the epoch is.
  def state
    {model: @net, optimizer: @optimizer, scheduler: @scheduler, loader: @loader}
  end

  # What an epoch that begins has: no losses, of no images, and random numbers to be chosen.
  FRESH = {"loss" => 0.0, "images" => 0, "rng" => false}.freeze
  private_constant :FRESH

  # After an epoch.
  def save(epoch)
    Torch::Distributed::Checkpoint.save(@options[:checkpoint], **state, name: format("epoch-%03d", epoch), epoch: epoch, keep: @options[:keep])
  end

  # Within an epoch: the sums go on where they were. Rank 0's are saved, so they are made everybody's.
  def save_within(epoch, batches, loss, images)
    loss, images = sum_over_ranks(loss, images)
    Torch::Distributed::Checkpoint.save(@options[:checkpoint], **state, name: format("epoch-%03d-batch-%06d", epoch, batches), epoch: epoch,
      extra: {"batches" => batches, "loss" => loss, "images" => images.to_i}, keep: @options[:keep])
  end

  # @return [Array(Integer, Hash)] the epoch to go on with, and what it has had
  def resume
    return [1, FRESH] unless @options[:resume]

    loaded = Torch::Distributed::Checkpoint.load(@options[:checkpoint], **state, required: false)
    unless loaded
      say "no checkpoint in #{@options[:checkpoint]}, starting afresh"
      return [1, FRESH]
    end
    unless loaded.extra.key?("batches")
      say "resumed after epoch #{loaded.epoch} from #{loaded.path}"
      return [loaded.epoch + 1, FRESH]
    end
    say "resumed after batch #{loaded.extra["batches"]} of epoch #{loaded.epoch} from #{loaded.path}"
    sums = @rank.zero? ? loaded.extra.slice("loss", "images") : {}
    [loaded.epoch, FRESH.merge(sums, "rng" => loaded.rng_restored)]
  end

  # Data parallel training is right only if every rank ends with the same parameters, bit for bit.
  def compare_ranks
    @net.named_parameters.each do |name, parameter|
      mine = parameter.detach
      all = Array.new(@world_size) { Torch.empty_like(mine) }
      Torch::Distributed.all_gather(all, mine)
      different = all.index { |other| !Torch.equal(other, mine) }
      raise "#{name} differs between ranks #{@rank} and #{different}" if different
    end
    say "parameters are equal, bit for bit, on #{@world_size} #{(@world_size == 1) ? "rank" : "ranks"}"
  end

  def say(text)
    puts text if @rank.zero?
    $stdout.flush
  end

  def now
    Process.clock_gettime(Process::CLOCK_MONOTONIC)
  end
end
