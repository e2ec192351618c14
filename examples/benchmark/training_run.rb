# frozen_string_literal: true

require "torch/nn/parallel/distributed_data_parallel"
require_relative "../common/ranks"
require_relative "../common/mnist_data"
require_relative "models"

# One rank's part of one measurement: a backend, a number of processes and a batch size.
class TrainingRun
  SEED = 1

  # What a rank reports; the losses are means over the ranks, one for each timed step.
  Result = Struct.new(:backend, :processes, :batch_size, :seconds, :losses, keyword_init: true) do
    def images_per_second
      losses.size * batch_size * processes / seconds
    end

    # How far the loss fell from the first timed steps to the last; single steps vary too much.
    def loss_reduction
      few = [losses.size / 10, 1].max
      losses.first(few).sum / few - losses.last(few).sum / few
    end

    def loss_reduction_per_step
      loss_reduction / losses.size
    end

    def loss_reduction_per_second
      loss_reduction / seconds
    end

    def final_loss
      losses.last
    end
  end

  # @param options [Hash] the command line's options, see training.rb
  def initialize(options, backend:, processes:, batch_size:)
    @options = options
    @backend = backend
    @processes = processes
    @batch_size = batch_size
  end

  # A single process trains without a group, as a program that knows nothing of processes would.
  #
  # @return [Result]
  def measure
    Torch::Distributed.init_process_group(@backend) if @processes > 1
    @rank = (@processes > 1) ? Torch::Distributed.get_rank : 0
    @device = Ranks.device(@backend)
    prepare
    warm_up
    losses, seconds = timed
    Result.new(backend: @backend, processes: @processes, batch_size: @batch_size, seconds: seconds, losses: over_ranks(losses))
  ensure
    Torch::Distributed.destroy_process_group if Torch::Distributed.initialized?
  end

  private

  def prepare
    @images, @labels = @options[:synthetic] ? synthetic : mnist
    Torch.manual_seed(SEED)
    net = BenchmarkModels.build(@options[:arch]).to(@device)
    @model = (@processes > 1) ? Torch::NN::Parallel::DistributedDataParallel.new(net, device_ids: Ranks.device_ids(@device)) : net
    @optimizer = Torch::Optim::SGD.new(net.parameters, lr: @options[:lr])
    @order = Torch::Utils::Data::DistributedSampler.new(@labels.size(0), num_replicas: @processes, rank: @rank, seed: SEED).to_a
    @at = 0
  end

  def mnist
    data = MNISTData.load(@options[:data_dir])
    data.values_at(:train_images, :train_labels)
  end

  # Ten patterns with noise upon them: as many images as in MNIST would have been read, and something to learn.
  def synthetic
    Torch.manual_seed(SEED)
    labels = Torch.randint(0, 10, [4096], dtype: :int64)
    patterns = Torch.randn(10, 1, 28, 28)
    [patterns.index_select(0, labels) + Torch.randn(4096, 1, 28, 28), labels]
  end

  def warm_up
    @options[:warmup].times { step }
    wait_for_all
  end

  def timed
    started = Process.clock_gettime(Process::CLOCK_MONOTONIC)
    losses = Array.new(@options[:steps]) { step }
    wait_for_all
    [losses, Process.clock_gettime(Process::CLOCK_MONOTONIC) - started]
  end

  def step
    Torch::Distributed.keep_memory if @processes == 1
    images, labels = batch
    @optimizer.zero_grad
    loss = Torch::NN::F.nll_loss(@model.call(images), labels)
    loss.backward
    @optimizer.step
    loss.item
  end

  # The next images of this rank's share, from its beginning again where it ends.
  def batch
    indices = Torch.tensor(Array.new(@batch_size) { |i| @order[(@at + i) % @order.size] }, dtype: :int64)
    @at += @batch_size
    [@images.index_select(0, indices).to(@device), @labels.index_select(0, indices).to(@device)]
  end

  # On a GPU the last `item` has waited for all of this rank's work.
  def wait_for_all
    Torch::Distributed.barrier if @processes > 1
  end

  def over_ranks(losses)
    return losses if @processes == 1

    sums = Torch.tensor(losses, dtype: :float64).to(@device)
    Torch::Distributed.all_reduce(sums)
    (sums / @processes).cpu.to_a
  end
end
