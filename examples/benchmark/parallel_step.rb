# frozen_string_literal: true

# One rank of compare_parallel.rb, which starts it.

require_relative "rank"
require_relative "sharded_models"

# The training step that is timed.
class ParallelContest
  Pipelining = Torch::Distributed::Pipelining
  SCHEDULES = {
    "gpipe" => Pipelining::ScheduleGPipe, "1f1b" => Pipelining::Schedule1F1B, "interleaved" => Pipelining::ScheduleInterleaved1F1B,
    "zero_bubble" => Pipelining::ScheduleInterleavedZeroBubble
  }.freeze

  # @param order [Hash] schedule (alone: the model on each rank; tensor: its layers are divided), batch, micro_batches, fused, warmup, steps
  # @return [Hash] the answer
  def do(order)
    3.times { GC.start }
    Torch.manual_seed(1)
    net = ShardedModels::NAMES.fetch("layers").new
    input, target = net.batch(order["batch"])
    step, report = case order["schedule"]
    when "alone" then alone(net, input, target, order)
    when "tensor" then tensor(net, input, target, order)
    else pipeline(net, input, target, order)
    end
    order["warmup"].times { step.call }
    report&.call
    times = Rank.milliseconds(order["steps"], &step)
    measured = report&.call
    {"milliseconds" => times, "bubble" => measured&.bubble, "theory" => measured&.theory, "report" => measured&.to_s}
  end

  private

  def alone(net, input, target, order)
    optimizer = optimizer(net.parameters, order)
    [-> { train(optimizer) { net.loss(net.call(input), target).backward } }, nil]
  end

  # Pairs of a column and a row layer.
  def tensor(net, input, target, order)
    ways = Torch::Distributed::Tensor::Parallel
    plan = (0...net.units.size).to_h { |i| ["units.#{i}.0", i.even? ? ways::ColwiseParallel.new : ways::RowwiseParallel.new] }
    mesh = Torch::Distributed.init_device_mesh("cpu", [Torch::Distributed.get_world_size], mesh_dim_names: ["tp"])
    alone(ways.parallelize_module(net, mesh, plan), input, target, order)
  end

  def optimizer(parameters, order)
    Torch::Optim::Adam.new(parameters, lr: 0.001, **(order["fused"] ? {fused: true} : {}))
  end

  def pipeline(net, input, target, order)
    rank, ranks = Torch::Distributed.get_rank, Torch::Distributed.get_world_size
    per_rank = (order["schedule"] == "interleaved") ? 2 : 1
    parts = net.units.each_slice(net.units.size / (ranks * per_rank)).to_a
    stages = (rank...parts.size).step(ranks).map do |index|
      Pipelining::PipelineStage.new(layers: parts[index], stage_index: index, num_stages: parts.size)
    end
    schedule = SCHEDULES.fetch(order["schedule"]).new(stages, n_microbatches: order["micro_batches"], loss_fn: net.method(:loss))
    optimizer = optimizer(stages.flat_map { |stage| stage.submodule.parameters }, order)
    [-> { train(optimizer) { schedule.step(input, target: target) } }, schedule.method(:report)]
  end

  def train(optimizer)
    Torch::Distributed.keep_memory
    optimizer.zero_grad
    yield
    optimizer.step
  end
end

contest = ParallelContest.new
Rank.answer_orders(version: "torch-rb #{Torch::VERSION} on libtorch #{Torch::Distributed::LIBTORCH_VERSION}") { |order| contest.do(order) }
