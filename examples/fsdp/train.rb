#!/usr/bin/env ruby
# frozen_string_literal: true

# Trains a model whose parameters, gradients and optimizer state do not fit into the memory that each process may have,
# which it limits by itself: sharded over four processes it fits.
#
#   bundle exec torchrun --nproc-per-node=4 examples/fsdp/train.rb
#   bundle exec torchrun --nproc-per-node=4 examples/fsdp/train.rb --strategy no_shard      # runs out of memory
#
# --help lists the options.

require_relative "../common/bundle"
require_relative "../common/command_line"
require "torch/distributed"

# Layers with a skip.
class Tower < Torch::NN::Module
  # A layer's forward keeps what its backward needs.
  class Layer < Torch::NN::Module
    def initialize(width)
      super()
      @norm = Torch::NN::LayerNorm.new([width])
      @up = Torch::NN::Linear.new(width, 2 * width)
      @down = Torch::NN::Linear.new(2 * width, width)
    end

    def forward(x)
      x + @down.call(Torch::NN::F.relu(@up.call(@norm.call(x))))
    end
  end

  def initialize(width, depth)
    super()
    @layers = Torch::NN::ModuleList.new(Array.new(depth) { Layer.new(width) })
    @head = Torch::NN::Linear.new(width, 1)
  end

  def forward(x)
    @layers.each { |layer| x = layer.call(x) }
    @head.call(x)
  end
end

# One rank.
class Training
  FSDP = Torch::Distributed::FSDP
  MIB = 1 << 20

  def initialize(width:, depth:, batch_size:, strategy:, limit:)
    @width, @batch_size, @strategy, @limit = width, batch_size, strategy, limit
    Torch.manual_seed(1)                                                  # the same values on all ranks
    confine
    # Each layer is sharded before the next one is made: no process ever holds all of them.
    @net = sharded? ? FSDP.build(Tower::Layer) { Tower.new(width, depth) } : Tower.new(width, depth)
    explain
    @model = sharded? ? @net : Torch::NN::Parallel::DistributedDataParallel.new(@net)
    @optimizer = Torch::Optim::Adam.new(@model.parameters, lr: 3e-6, fused: true)
  end

  # @return [Array<Float>] the losses, averaged over the ranks
  def run(steps)
    Array.new(steps) do |step|
      x = batch
      @optimizer.zero_grad
      loss = Torch::NN::F.mse_loss(@model.call(x), x.sum(dim: 1, keepdim: true).sin)
      loss.backward
      @optimizer.step
      mean = Torch::Distributed.all_reduce(loss.detach.clone, op: :avg).item
      puts format("step %<step>d: loss %<mean>.4f", step: step, mean: mean) if first?
      mean
    end
  end

  def peak
    Torch::Distributed.memory_stats[:peak_bytes] / MIB
  end

  private

  def sharded?
    @strategy == "full_shard"
  end

  def first?
    Torch::Distributed.get_rank.zero?
  end

  # Each rank has rows of its own, the same in each step.
  def batch
    Torch.manual_seed(1000 + Torch::Distributed.get_rank)
    Torch.randn(@batch_size, @width) / Math.sqrt(@width)
  end

  # What the process has mapped so far, libraries above all, comes on top. What the other ranks share with it counts, too.
  def confine
    Torch::Distributed.track_memory
    mapped = File.read("/proc/self/status")[/^VmSize:\s+(\d+)/, 1].to_i * 1024
    Process.setrlimit(:AS, mapped + @limit)
  end

  def explain
    return unless first?

    estimate = Torch::Distributed.estimate_memory(@net, optimizer: :fused_adam, world_size: Torch::Distributed.get_world_size, limit: @limit)
    puts estimate, "each rank may map #{@limit / MIB} MiB; this is #{@strategy}"
  end
end

options = {width: 1024, depth: 12, batch_size: 16, steps: 10, strategy: "full_shard", limit: 768}
options = CommandLine.parse("torchrun --nproc-per-node=4 examples/fsdp/train.rb [options]", options, positive: %i[width depth batch_size steps limit]) do |opts|
  opts.on("--width N", Integer, "of the layers (#{options[:width]})")
  opts.on("--depth N", Integer, "how many layers (#{options[:depth]})")
  opts.on("--batch-size N", Integer, "rows of each rank (#{options[:batch_size]})")
  opts.on("--steps N", Integer, "steps (#{options[:steps]})")
  opts.on("--strategy NAME", %w[full_shard no_shard], "full_shard, or no_shard: DistributedDataParallel (#{options[:strategy]})")
  opts.on("--limit MIB", Integer, "memory that each rank may map beyond its libraries, in MiB (#{options[:limit]})")
end

$stdout.sync = true
Torch::Distributed.init_process_group("gloo") do
  training = Training.new(**options.slice(:width, :depth, :batch_size, :strategy), limit: options[:limit] * Training::MIB)
  losses = training.run(options[:steps])
  peaks = Torch::Distributed.all_gather_object(training.peak, serializer: :json)
  puts "done: loss #{format("%.4f", losses.first)} -> #{format("%.4f", losses.last)}; tensors took at most #{peaks.max} MiB on a rank" if Torch::Distributed.get_rank.zero?
end
