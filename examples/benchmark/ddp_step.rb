# frozen_string_literal: true

# Times training steps of one model and prints one line of JSON on rank 0: milliseconds of a step.
# Started by compare_ddp.rb; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from torchrun. With one
# process it is torch-rb alone.

require "bundler/setup"
require "json"
require "torch"
require "torch/distributed"
require "torch/nn/parallel/distributed_data_parallel"
require_relative "models"

name, batch, warmup, steps = ARGV[0], *ARGV[1..3].map { |text| Integer(text) }
world_size = Integer(ENV.fetch("WORLD_SIZE", "1"))
Torch::Distributed.init_process_group("gloo") if world_size > 1

Torch.manual_seed(1)
model, width = BenchmarkModels.build(name)
model = Torch::NN::Parallel::DistributedDataParallel.new(model) if world_size > 1
optimizer = Torch::Optim::SGD.new(model.parameters, lr: 0.01)
inputs = Torch.randn(batch, width)
targets = Torch.randint(0, 10, [batch], dtype: :int64)

step = lambda do |*|
  optimizer.zero_grad
  Torch::NN::F.cross_entropy(model.call(inputs), targets).backward
  optimizer.step
end

warmup.times(&step)
Torch::Distributed.barrier if world_size > 1
times = Array.new(steps) do
  started = Process.clock_gettime(Process::CLOCK_MONOTONIC)
  step.call
  1000 * (Process.clock_gettime(Process::CLOCK_MONOTONIC) - started)
end
if ENV.fetch("RANK", "0") == "0"
  puts JSON.generate("median" => times.sort[times.size / 2], "mean" => times.sum / times.size,
    "version" => "torch-rb #{Torch::VERSION}")
end
Torch::Distributed.destroy_process_group if world_size > 1
