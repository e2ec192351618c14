#!/usr/bin/env ruby
# frozen_string_literal: true

# A small model, trained on the processes that srun, mpirun or torchrun start. With a checkpoint it goes on where it was
# when it is started again, on as many processes as there are then.
#
#   srun ruby examples/slurm/train.rb --checkpoint run/model.pt
#
# --help lists the options.

require_relative "../common/bundle"
require_relative "../common/command_line"
require "fileutils"
require "socket"
require "torch/distributed"

# Srun and mpirun read through pipes, which Ruby would fill before anyone saw a line.
$stdout.sync = true

# Fits y = 3a - 2b + 1.
class Fit
  def initialize(steps:, batch_size:, pause:, checkpoint:)
    @steps, @batch_size, @pause, @checkpoint = steps, batch_size, pause, checkpoint
    Torch.manual_seed(7)
    @net = Torch::NN::Linear.new(2, 1)
    @model = Torch::NN::Parallel::DistributedDataParallel.new(@net)
    @optimizer = Torch::Optim::SGD.new(@model.parameters, lr: 0.1)
    @step = 0
  end

  # All ranks read the same file, so all are at the same step.
  def resume
    return unless @checkpoint && File.file?(@checkpoint)

    state = Torch.load(@checkpoint)
    @net.load_state_dict(state["model"])
    @step = state["step"].item
  end

  # @return [Float, nil] the last step's loss, averaged over the ranks; nil if all steps were done before
  def run
    resume
    puts "starting at step #{@step} with #{world_size} processes" if first?
    loss = nil
    while @step < @steps
      loss = advance
      save if first? && @checkpoint
      sleep @pause
    end
    mean(loss) if loss
  end

  private

  def first?
    Torch::Distributed.get_rank.zero?
  end

  def world_size
    Torch::Distributed.get_world_size
  end

  # Each rank has examples of its own.
  def advance
    Torch.manual_seed((@step * world_size) + Torch::Distributed.get_rank)
    inputs = Torch.randn(@batch_size, 2)
    wanted = inputs.matmul(Torch.tensor([[3.0], [-2.0]])) + 1
    @optimizer.zero_grad
    loss = Torch::NN::F.mse_loss(@model.call(inputs), wanted)
    loss.backward
    @optimizer.step
    @step += 1
    loss.detach
  end

  def mean(loss)
    Torch::Distributed.all_reduce(loss)
    loss.item / world_size
  end

  # Whole or not at all: a job may be ended at any time.
  def save
    FileUtils.mkdir_p(File.dirname(@checkpoint))
    Torch.save({"model" => @net.state_dict, "step" => Torch.tensor(@step)}, "#{@checkpoint}.new")
    File.rename("#{@checkpoint}.new", @checkpoint)
  end
end

options = CommandLine.parse("train.rb [options]", {steps: 20, batch_size: 16, pause: 0.0, checkpoint: nil, backend: "gloo"}, positive: %i[steps batch_size]) do |opts|
  opts.on("--steps N", Integer, "steps in all, those before a restart among them (20)")
  opts.on("--batch-size N", Integer, "examples of a step, of each process (16)")
  opts.on("--pause SECONDS", Float, "after each step, to see a longer run (0)")
  opts.on("--checkpoint FILE", "written after each step by rank 0, and read at the start")
  opts.on("--backend NAME", "gloo, or mpi under mpirun and srun --mpi (gloo)")
end

Torch::Distributed.init_process_group(options.delete(:backend))
puts format("rank %d of %d, local rank %s, on %s", Torch::Distributed.get_rank, Torch::Distributed.get_world_size,
  ENV.fetch("LOCAL_RANK", "unknown"), Socket.gethostname)
loss = Fit.new(**options).run
if Torch::Distributed.get_rank.zero?
  puts loss ? format("%d steps, loss %.6f", options[:steps], loss) : "all #{options[:steps]} steps were done before"
end
Torch::Distributed.destroy_process_group
