# frozen_string_literal: true

# Trains ResNet-18 on MNIST with several processes.
#
#   bundle exec torchrun --standalone --nproc-per-node=2 examples/resnet/train_ddp.rb --subset 6000
#
# The model is the torchvision gem's, in a bundler group of its own: `export BUNDLE_WITH=vision`, then
# `bundle install`, once.

# Bundler leaves out optional groups that are not named, and the program would not find its model.
ENV["BUNDLE_WITH"] ||= "vision"
require_relative "../common/bundle"
require "torch/distributed"
require_relative "../common/command_line"
require_relative "../common/mnist_data"
require_relative "model"

options = {epochs: 3, batch_size: 128, lr: 0.001, subset: nil, image_size: 28, gpus: nil, backend: nil,
           data_dir: File.expand_path("../mnist/data", __dir__)}
positive = %i[epochs batch_size lr subset image_size gpus]
options = CommandLine.parse("torchrun [its options] train_ddp.rb [options]", options, positive: positive) do |opts|
  opts.on("--epochs N", Integer, "(#{options[:epochs]})")
  opts.on("--batch-size N", Integer, "images in a batch of each process (#{options[:batch_size]})")
  opts.on("--lr RATE", Float, "learning rate of Adam (#{options[:lr]})")
  opts.on("--subset N", Integer, "use the first N images only, for a quick look")
  opts.on("--image-size N", Integer, "scale the images to N x N pixels (#{options[:image_size]}, as they are)")
  opts.on("--data-dir DIR", "where the MNIST files are or shall be")
  opts.on("--backend NAME", "gloo or nccl (nccl with GPUs, else gloo)")
  opts.on("--gpus N", Integer, "without torchrun: processes to start (one for each GPU)")
end
begin
  DigitsResNet.load_models
rescue LoadError => e
  abort "#{File.basename($PROGRAM_NAME)}: #{e.message}"
end

# One rank's part of the job.
class ResNetTraining
  SEED = 1

  # @param context [Torch::Distributed::RunContext]
  def initialize(options, context)
    @options = options
    @context = context
    @device = context.device
    @data = MNISTData.load(options[:data_dir])
    @data.transform_values! { |tensor| tensor[0...options[:subset]] } if options[:subset]
    @model = Torch::NN::Parallel::DistributedDataParallel.new(DigitsResNet.build.to(@device))
    @optimizer = Torch::Optim::Adam.new(@model.parameters, lr: options[:lr])
    @sampler = Torch::Utils::Data::DistributedSampler.new(@data[:train_labels].size(0), seed: SEED)
  end

  def run
    say format("ResNet-18, %d parameters, %d ranks on %s, %d images a rank and epoch, batches of %d, %dx%d pixels",
      @model.parameters.sum(&:numel), @context.world_size, @device.type, @sampler.length, @options[:batch_size],
      @options[:image_size], @options[:image_size])
    (1..@options[:epochs]).each do |epoch|
      started = Process.clock_gettime(Process::CLOCK_MONOTONIC)
      loss, images = train(epoch)
      seconds = Process.clock_gettime(Process::CLOCK_MONOTONIC) - started
      correct, total = evaluate
      say format("epoch %d: loss %.4f, %d images/s, test accuracy %.2f %% (%d of %d)", epoch, loss, images / seconds,
        100.0 * correct / total, correct, total)
    end
  end

  private

  # @return [Array(Float, Float)] the mean loss over all ranks, and the images that all of them saw
  def train(epoch)
    @model.train
    @sampler.set_epoch(epoch)
    sum = 0.0
    @sampler.each_slice(@options[:batch_size]) do |indices|
      images, labels = batch(:train, indices)
      @optimizer.zero_grad
      loss = Torch::NN::F.cross_entropy(@model.call(images), labels)
      loss.backward
      @optimizer.step
      sum += loss.item * indices.size
    end
    total, images = over_ranks(sum, @sampler.length)
    [total / images, images]
  end

  # Each test image is looked at by exactly one rank. The module itself is called, as ranks may have unequal
  # numbers of batches.
  #
  # @return [Array(Integer, Integer)] right answers and images
  def evaluate
    @model.eval
    mine = @context.rank.step(@data[:test_labels].size(0) - 1, @context.world_size).to_a
    correct = Torch.no_grad do
      mine.each_slice(500).sum do |indices|
        images, labels = batch(:test, indices)
        @model.module.call(images).argmax(1).eq(labels).sum.item
      end
    end
    over_ranks(correct, mine.size).map(&:to_i)
  end

  def batch(set, indices)
    indices = Torch.tensor(indices, dtype: :int64)
    images = @data[:"#{set}_images"].index_select(0, indices).to(@device)
    unless @options[:image_size] == images.size(2)
      images = Torch::NN::F.interpolate(images, size: [@options[:image_size]] * 2, mode: "bilinear", align_corners: false)
    end
    [images, @data[:"#{set}_labels"].index_select(0, indices).to(@device)]
  end

  def over_ranks(*values)
    sums = Torch.tensor(values, dtype: :float64).to(@device)
    Torch::Distributed.all_reduce(sums)
    sums.cpu.to_a
  end

  def say(text)
    return unless @context.main?

    puts text
    $stdout.flush
  end
end

gpus = Torch::CUDA.available? ? Torch::CUDA.device_count : 0
processes = options[:gpus] || [gpus, 1].max
CommandLine.refuse("--gpus #{processes}: there are #{gpus} GPUs") if gpus.positive? && processes > gpus
device = "cpu" if options[:backend] == "gloo"
begin
  # The same seed everywhere, so that the models start equal; DistributedDataParallel would see to it anyhow.
  Torch::Distributed.run(processes, backend: options[:backend], device: device, seed: ResNetTraining::SEED) do |context|
    MNISTData.fetch(options[:data_dir]) { |line| puts line }
    ResNetTraining.new(options, context).run
  end
rescue Torch::Distributed::WorkerError => e
  abort "#{File.basename($PROGRAM_NAME)}: #{e.message}"
rescue Interrupt
  exit 130
end
