# frozen_string_literal: true

require "torch/nn/parallel/data_parallel"
require_relative "../common/ranks"

# The same training in three forms. Each yields the losses step by step and the parameters at the end.
#
# The loss is the sum over a batch, so an example weighs the same however a batch is divided. One process and
# DataParallel see the whole sum and its gradient. DistributedDataParallel averages the gradients of K
# processes, each of a part of the sum: 1/K of the whole gradient. SGD gets it back with a learning rate K
# times as large; Adam with eps 0 does not change with the gradient's scale.
class Equivalence
  SEED = 1

  # What one form of training gave.
  Outcome = Struct.new(:losses, :parameters)

  # Two layers, so that a step depends on the parameters that earlier steps gave.
  class Net < Torch::NN::Module
    def initialize(dim)
      super()
      @fc1 = Torch::NN::Linear.new(dim, 2 * dim)
      @fc2 = Torch::NN::Linear.new(2 * dim, 1)
    end

    def forward(x)
      @fc2.call(Torch.tanh(@fc1.call(x)))
    end
  end

  # @param options [Hash] the command line's options, see main.rb
  # @param replicas [Integer] K, the processes that share a batch
  def initialize(options, replicas)
    @options = options
    @replicas = replicas
    Torch.manual_seed(SEED)
    @inputs = Torch.randn(options[:num_examples], options[:dim], dtype: :float64)
    @targets = Torch.sin(@inputs.sum(dim: 1, keepdim: true)) + 0.1 * Torch.randn(options[:num_examples], 1, dtype: :float64)
  end

  # The examples of each process in each iteration of an epoch, counted from 0.
  #
  # @return [Array<Array<Array<Integer>>>] by iteration and process
  def shards(epoch)
    by_process = Array.new(@replicas) { |rank| sampler(rank, epoch).each_slice(@options[:batch_size] / @replicas).to_a }
    by_process.first.zip(*by_process.drop(1))
  end

  # @return [Array<Integer>] the examples that no process gets in this epoch
  def left_out(epoch)
    (0...@options[:num_examples]).to_a - shards(epoch).flatten
  end

  # @return [Outcome] of one process, on the CPU, that takes the whole batches
  def one_process
    net = build
    train(net, net, scale: 1) { |iteration| whole(iteration) }
  end

  # @return [Outcome] of one process that divides each batch among its GPUs; without GPUs among as many parts on the CPU
  def data_parallel
    devices = (Ranks.gpus < @replicas) ? ["cpu"] * @replicas : @options[:gpus].map { |number| "cuda:#{number}" }
    net = build.to(devices.first)
    model = Torch::NN::DataParallel.new(net, device_ids: devices)
    train(net, model, scale: 1, device: Torch.device(devices.first)) { |iteration| whole(iteration) }
  end

  # One of K processes; the others make the same call.
  #
  # @return [Outcome] the losses are sums over the processes, as are those of the other forms
  def distributed
    Torch::Distributed.init_process_group
    rank = Torch::Distributed.get_rank
    device = Ranks.device
    net = build.to(device)
    model = Torch::NN::Parallel::DistributedDataParallel.new(net, device_ids: Ranks.device_ids(device))
    outcome = train(net, model, scale: @replicas, device: device) { |iteration| iteration[rank] }
    sums = Torch.tensor(outcome.losses, dtype: :float64).to(device)
    Torch::Distributed.all_reduce(sums)
    Outcome.new(sums.cpu.to_a, outcome.parameters)
  ensure
    Torch::Distributed.destroy_process_group if Torch::Distributed.initialized?
  end

  # @return [Float] the largest difference between two outcomes, in parts of the value where that is above 1; not a number
  #   where one has diverged
  def self.difference(one, other)
    pairs = one.to_a.flatten.zip(other.to_a.flatten)
    return Float::NAN unless pairs.flatten.all?(&:finite?)

    pairs.map { |a, b| (a - b).abs / [a.abs, b.abs, 1.0].max }.max
  end

  private

  def sampler(rank, epoch)
    sampler = Torch::Utils::Data::DistributedSampler.new(@options[:num_examples], num_replicas: @replicas, rank: rank,
      shuffle: !@options[:no_shuffle], seed: SEED, drop_last: @options[:drop_last])
    sampler.set_epoch(epoch)
    sampler
  end

  # What all processes together take in an iteration, in the order in which one process would.
  def whole(iteration)
    iteration.first.zip(*iteration.drop(1)).flatten.compact
  end

  def build
    Torch.manual_seed(SEED)
    Net.new(@options[:dim]).double
  end

  def optimizer(parameters, scale)
    case @options[:opt]
    when "sgd" then Torch::Optim::SGD.new(parameters, lr: @options[:lr] * scale)
    when "adam" then Torch::Optim::Adam.new(parameters, lr: @options[:lr], eps: @options[:eps])
    end
  end

  # @yieldparam iteration [Array<Array<Integer>>] the examples by process
  # @yieldreturn [Array<Integer>] those to take here
  def train(net, model, scale:, device: Torch.device("cpu"))
    optimizer = optimizer(net.parameters, scale)
    losses = (0...@options[:epochs]).flat_map do |epoch|
      shards(epoch).map do |iteration|
        indices = Torch.tensor(yield(iteration), dtype: :int64)
        inputs, targets = [@inputs, @targets].map { |tensor| tensor.index_select(0, indices).to(device) }
        optimizer.zero_grad
        loss = Torch::NN::F.mse_loss(model.call(inputs), targets, reduction: "sum")
        loss.backward
        optimizer.step
        loss.item
      end
    end
    Outcome.new(losses, net.parameters.map { |parameter| parameter.detach.cpu.to_a })
  end
end
