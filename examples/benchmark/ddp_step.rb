# frozen_string_literal: true

# One rank of compare_ddp.rb, which starts it. Unless the order says `ddp` it is torch-rb alone, which keeps memory from step to step as
# a rank does.

require_relative "rank"
require "torch/nn/parallel/distributed_data_parallel"
require_relative "models"

# The training step that is timed, and the memory it takes.
class Contest
  CLASSES = 10

  # @param order [Hash] model, batch, warmup, steps, optimizer, ddp; fused for timing; view for memory
  # @return [Hash] the answer
  def do(order)
    collect
    # What only a thread's stack refers to goes with it.
    order["memory"] ? Thread.new { memory(order) }.value : times(order)
  end

  private

  def times(order)
    net = build(order)
    model = order["ddp"] ? Torch::NN::Parallel::DistributedDataParallel.new(net) : net
    optimizer = optimizer(model, order)
    order["warmup"].times { step(model, optimizer) }
    times = Rank.milliseconds(order["steps"]) { step(model, optimizer) }
    {"mean" => times.sum / times.size, "median" => times.sort[times.size / 2]}
  end

  def memory(order)
    net = build(order)
    warm_up(order)
    before = private_bytes
    model = order["ddp"] ? Torch::NN::Parallel::DistributedDataParallel.new(net, gradient_as_bucket_view: order["view"]) : net
    optimizer = optimizer(model, order)
    apart { order["steps"].times { step(model, optimizer) } }
    {"gradients" => net.parameters.sum { |parameter| parameter.numel * parameter.element_size }, "growth" => private_bytes - before,
     "peak" => 1024 * File.read("/proc/self/status")[/^VmHWM:\s+(\d+)/, 1].to_i}
  end

  # The libraries below keep what they once needed: that is not the gradients' memory.
  def warm_up(order)
    apart do
      net = BenchmarkModels.build(order["model"])
      2.times { step(net, Torch::Optim::SGD.new(net.parameters, lr: 0.01)) }
    end
  end

  # What only the block had is gone afterwards: a thread takes with it what its stack referred to.
  def apart(&block)
    Thread.new(&block).join
    collect
  end

  def collect
    3.times { GC.start }
  end

  def build(order)
    Torch.manual_seed(1)
    @inputs = Torch.randn(order["batch"], 1, 28, 28)
    @targets = Torch.randint(0, CLASSES, [order["batch"]], dtype: :int64)
    BenchmarkModels.build(order["model"])
  end

  # @return [Torch::Optim::Optimizer]
  def optimizer(model, order)
    options = order["fused"] ? {fused: true} : {}
    case order["optimizer"]
    when "sgd" then Torch::Optim::SGD.new(model.parameters, lr: 0.01, **options)
    when "momentum" then Torch::Optim::SGD.new(model.parameters, lr: 0.01, momentum: 0.9, **options)
    when "adam" then Torch::Optim::Adam.new(model.parameters, lr: 0.001, **options)
    end
  end

  # DistributedDataParallel keeps memory by itself.
  def step(model, optimizer)
    Torch::Distributed.keep_memory unless model.is_a?(Torch::NN::Parallel::DistributedDataParallel)
    optimizer.zero_grad
    Torch::NN::F.nll_loss(model.call(@inputs), @targets).backward
    optimizer.step
  end

  # Memory of its own, and its part of what it shares with the other rank: shared pages that only it has touched count once.
  def private_bytes
    kilobytes = File.read("/proc/self/smaps_rollup").scan(/^Pss_(?:Anon|Shmem):\s+(\d+)/).flatten
    1024 * kilobytes.sum(&:to_i)
  end
end

contest = Contest.new
Rank.answer_orders { |order| contest.do(order) }
