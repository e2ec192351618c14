# frozen_string_literal: true

require "torch/distributed"
require "torch/nn/parallel/distributed_data_parallel"
require "torch/utils/data/distributed_sampler"
require_relative "checkpoint"
require_relative "mnist_data"
require_relative "model"
require_relative "progress"

# One rank's training on MNIST: its shard of the data, the epochs, the evaluation over all ranks.
class Trainer
  SEED = 1

  # @param options [Hash] the command line's options, see distributed.rb
  def initialize(options)
    @options = options
    @rank = Torch::Distributed.get_rank
    @world_size = Torch::Distributed.get_world_size
    @device = choose_device
    @data = MNISTData.load(options[:data_dir])
    @data.transform_values! { |tensor| tensor[0...options[:subset]] } if options[:subset]
    Torch.manual_seed(SEED)
    @net = MNISTNet.new.to(@device)
    @model = Torch::NN::Parallel::DistributedDataParallel.new(@net, device_ids: device_ids)
    @optimizer = Torch::Optim::Adadelta.new(@net.parameters, lr: options[:lr])
    @scheduler = Torch::Optim::LRScheduler::StepLR.new(@optimizer, step_size: 1, gamma: options[:gamma])
    @sampler = Torch::Utils::Data::DistributedSampler.new(0...@data[:train_labels].size(0), seed: SEED)
  end

  def run
    first = resume + 1
    say format("%d ranks on %s, %d images a rank and epoch, batches of %d", @world_size, @device.type,
      @sampler.length, @options[:batch_size])
    (first..@options[:epochs]).each do |epoch|
      loss, images_per_second = train_epoch(epoch)
      correct, total = evaluate
      @scheduler.step
      say format("epoch %d: loss %.4f, %d images/s, test accuracy %.2f %% (%d of %d)", epoch, loss,
        images_per_second, 100.0 * correct / total, correct, total)
      save(epoch)
    end
    compare_ranks
  end

  private

  def choose_device
    return Torch.device("cpu") unless Torch::CUDA.available?

    Torch.device("cuda:#{Integer(ENV.fetch("LOCAL_RANK", @rank)) % Torch::CUDA.device_count}")
  end

  def device_ids
    [@device.index] if @device.type == "cuda"
  end

  # @return [Array(Float, Float)] the mean loss over all ranks, and images per second of all together
  def train_epoch(epoch)
    @model.train
    @sampler.set_epoch(epoch)
    # Dropout differs by rank, and an epoch is the same whether the run was resumed before it or not.
    Torch.manual_seed(SEED + epoch * @world_size + @rank)
    batches = @sampler.each_slice(@options[:batch_size]).to_a
    progress = Progress.new("epoch #{epoch}", batches.size, @options[:log_interval], shown: @rank.zero?)
    started = now
    losses = batches.map do |indices|
      loss = train_batch(indices)
      progress.advance("loss #{format("%.4f", loss)}")
      loss * indices.size
    end
    progress.finish
    sum, images = sum_over_ranks(losses.sum, @sampler.length)
    [sum / images, images / (now - started)]
  end

  def train_batch(indices)
    images, labels = batch(:train, Torch.tensor(indices))
    @optimizer.zero_grad
    loss = Torch::NN::F.nll_loss(@model.call(images), labels)
    loss.backward
    @optimizer.step
    loss.item
  end

  # Every test image is looked at by exactly one rank, so the sums are exact.
  # @return [Array(Integer, Integer)] right answers and images
  def evaluate
    @model.eval
    correct = 0
    mine = @rank.step(@data[:test_labels].size(0) - 1, @world_size).to_a
    Torch.no_grad do
      mine.each_slice(1000) do |indices|
        images, labels = batch(:test, Torch.tensor(indices))
        correct += @net.call(images).argmax(1).eq(labels).sum.item
      end
    end
    sum_over_ranks(correct, mine.size).map(&:to_i)
  end

  def batch(set, indices)
    [@data[:"#{set}_images"].index_select(0, indices).to(@device),
      @data[:"#{set}_labels"].index_select(0, indices).to(@device)]
  end

  def sum_over_ranks(*values)
    sums = Torch.tensor(values, dtype: :float64).to(@device)
    Torch::Distributed.all_reduce(sums)
    sums.to_a
  end

  def save(epoch)
    return unless @options[:checkpoint]

    Checkpoint.save(@options[:checkpoint], model: @net, optimizer: @optimizer, epoch: epoch) if @rank.zero?
    Torch::Distributed.barrier
  end

  # @return [Integer] the last finished epoch, 0 for a fresh start
  def resume
    path = @options[:checkpoint]
    return 0 unless @options[:resume]

    unless path && File.exist?(path)
      say "no checkpoint at #{path.inspect}, starting afresh"
      return 0
    end
    epoch = Checkpoint.load(path, model: @net, optimizer: @optimizer)
    @scheduler.step(epoch)
    say "resumed after epoch #{epoch} from #{path}"
    epoch
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
