# frozen_string_literal: true

# One rank of compare_fsdp.rb, which starts it.

require_relative "rank"
require "torch/distributed/fsdp"
require "torch/nn/parallel/distributed_data_parallel"
require_relative "sharded_models"

# The training step that is timed.
class ShardedContest
  FSDP = Torch::Distributed::FSDP

  # @param order [Hash] model, batch, warmup, steps, fused, and how it is distributed: alone, ddp, full_shard, shard_grad_op
  # @return [Hash] the answer
  def do(order)
    3.times { GC.start }
    Torch.manual_seed(1)
    net = ShardedModels::NAMES.fetch(order["model"]).new
    input, target = net.batch(order["batch"])
    model = distribute(net, order["how"])
    optimizer = Torch::Optim::Adam.new(model.parameters, lr: 0.001, **(order["fused"] ? {fused: true} : {}))
    step = lambda do
      Torch::Distributed.keep_memory if order["how"] == "alone"
      optimizer.zero_grad
      net.loss(model.call(input), target).backward
      optimizer.step
    end
    order["warmup"].times { step.call }
    {"milliseconds" => Rank.milliseconds(order["steps"], &step)}
  end

  private

  def distribute(net, how)
    case how
    when "alone" then net
    when "ddp" then Torch::NN::Parallel::DistributedDataParallel.new(net)
    else
      net.units.each { |unit| FSDP.fully_shard(unit, reshard_after_forward: how == "full_shard") }
      FSDP.fully_shard(net)
    end
  end
end

contest = ShardedContest.new
Rank.answer_orders { |order| contest.do(order) }
