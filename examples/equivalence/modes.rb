# frozen_string_literal: true

require "torch/nn/parallel/data_parallel"
require_relative "../common/ranks"

# The same training in three forms. Each yields the losses step by step and the parameters at the end.
#
# The loss is a sum over a batch, so an example weighs the same however a batch is divided. One process and
# DataParallel see the whole sum and its gradient. DistributedDataParallel averages the gradients of K
# processes, each of a part of the sum: 1/K of the whole gradient. SGD gets it back with a learning rate K
# times as large; Adam with eps 0 does not change with the gradient's scale.
class Equivalence
  SEED = 1
  # Of a squared error in the loss, so that the learning rate can be 1 with the sum over a batch.
  WEIGHT = 0.01

  # What one form of training gave, and its name.
  Outcome = Struct.new(:form, :lr, :losses, :parameters)

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

  # @return [Integer] processes that share the examples
  attr_reader :processes

  # @param options [Hash] the command line's options, see main.rb; the batch size is that of each process
  # @param processes [Integer]
  def initialize(options, processes)
    @options = options
    @processes = processes
    Torch.manual_seed(SEED)
    @inputs = Torch.randn(options[:num_examples], options[:dim], dtype: :float64)
    @targets = Torch.sin(@inputs.sum(dim: 1, keepdim: true)) + 0.1 * Torch.randn(options[:num_examples], 1, dtype: :float64)
  end

  # @return [Integer] examples of each process in an iteration
  def batch_size
    @options[:batch_size]
  end

  # The examples of each process in each iteration of an epoch, counted from 0.
  #
  # @return [Array<Array<Array<Integer>>>] by iteration and process
  def shards(epoch)
    by_process = Array.new(@processes) { |rank| sampler(rank, epoch).each_slice(batch_size).to_a }
    by_process.first.zip(*by_process.drop(1))
  end

  # @return [Array<Integer>] the examples that no process gets in this epoch
  def left_out(epoch)
    (0...@options[:num_examples]).to_a - shards(epoch).flatten
  end

  # @return [Outcome] of one process that takes the batches of all; on the first of `--gpus` if only that is named
  def one_process
    device = Torch.device((gpus.size == 1) ? devices(1).first : "cpu")
    net = build.to(device)
    train("one process", net, net, device: device) { |iteration| merged(iteration) }
  end

  # @return [Outcome] of one process that divides each batch among its GPUs; without GPUs among as many parts on the CPU
  def data_parallel
    devices = devices(@processes)
    net = build.to(devices.first)
    model = Torch::NN::DataParallel.new(net, device_ids: devices)
    train("DataParallel", net, model, device: Torch.device(devices.first)) { |iteration| merged(iteration) }
  end

  # One of the processes; the others make the same call.
  #
  # @param lr [Float]
  # @return [Outcome] the losses are sums over the processes, as are those of the other forms
  def distributed(lr: @options[:lr])
    Torch::Distributed.init_process_group
    rank = Torch::Distributed.get_rank
    local_rank = Torch::Distributed.get_node_local_rank(0)
    device = gpus.empty? ? Ranks.device : Torch.device(devices(1)[local_rank])
    net = build.to(device)
    model = Torch::NN::Parallel::DistributedDataParallel.new(net, device_ids: Ranks.device_ids(device))
    outcome = train("DDP, #{@processes} processes", net, model, lr: lr, device: device) { |iteration| iteration[rank] }
    sums = Torch.tensor(outcome.losses, dtype: :float64).to(device)
    Torch::Distributed.all_reduce(sums)
    outcome.losses = sums.cpu.to_a
    outcome
  ensure
    Torch::Distributed.destroy_process_group if Torch::Distributed.initialized?
  end

  # @return [Float] the largest difference between two outcomes, in parts of the value where that is above 1; not a number
  #   where one has diverged
  def self.difference(one, other)
    numbers = [one, other].map { |outcome| [outcome.losses, outcome.parameters].flatten }
    pairs = numbers.first.zip(numbers.last)
    return Float::NAN unless pairs.flatten.all?(&:finite?)

    pairs.map { |a, b| (a - b).abs / [a.abs, b.abs, 1.0].max }.max
  end

  private

  def gpus
    @options[:gpus] || []
  end

  # @return [Array<String>] those of `--gpus`, or so many; the CPU if one of them is not there
  def devices(count)
    numbers = gpus.empty? ? (0...count).to_a : gpus
    numbers.map { |number| (numbers.max < Ranks.gpus) ? "cuda:#{number}" : "cpu" }
  end

  def sampler(rank, epoch)
    sampler = Torch::Utils::Data::DistributedSampler.new(@options[:num_examples], num_replicas: @processes, rank: rank,
      shuffle: !@options[:no_shuffle], seed: SEED, drop_last: @options[:drop_last])
    sampler.set_epoch(epoch)
    sampler
  end

  # What all processes together take in an iteration, in the order in which one process would.
  def merged(iteration)
    iteration.first.zip(*iteration.drop(1)).flatten.compact
  end

  def build
    Torch.manual_seed(SEED)
    Net.new(@options[:dim]).double
  end

  def optimizer(parameters, lr)
    case @options[:opt]
    when "sgd" then Torch::Optim::SGD.new(parameters, lr: lr)
    when "adam" then Torch::Optim::Adam.new(parameters, lr: lr, eps: @options[:eps])
    end
  end

  # @yieldparam iteration [Array<Array<Integer>>] the examples by process
  # @yieldreturn [Array<Integer>] those to take here
  def train(form, net, model, device:, lr: @options[:lr])
    optimizer = optimizer(net.parameters, lr)
    losses = (0...@options[:epochs]).flat_map do |epoch|
      shards(epoch).map do |iteration|
        indices = Torch.tensor(yield(iteration), dtype: :int64)
        inputs, targets = [@inputs, @targets].map { |tensor| tensor.index_select(0, indices).to(device) }
        optimizer.zero_grad
        loss = WEIGHT * Torch::NN::F.mse_loss(model.call(inputs), targets, reduction: "sum")
        loss.backward
        optimizer.step
        loss.item
      end
    end
    Outcome.new(form, lr, losses, net.parameters.map { |parameter| parameter.detach.cpu.to_a })
  end
end
