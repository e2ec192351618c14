#!/usr/bin/env ruby
# frozen_string_literal: true

# Trains a small GPT on the bytes of a text, divided in every way that there is: data, tensor and pipeline dimensions,
# whose product is the number of processes.
#
#   bundle exec torchrun --nproc-per-node=4 examples/gpt/train.rb --dp 2 --tp 2
#   bundle exec torchrun --nproc-per-node=4 examples/gpt/train.rb --dp 2 --pp 2 --shard full_shard --checkpoint gpt
#
# README.md has what it prints and how to choose; --help lists the options.

require_relative "../common/bundle"
require_relative "../common/command_line"
require_relative "model"

# One process.
class GptTraining
  Checkpoint = Torch::Distributed::Checkpoint
  SEED = 1

  def initialize(context, options)
    @context = context
    @options = options
    @text = Torch.tensor(File.binread(options[:text]).bytes, dtype: :int64)
    Torch.manual_seed(SEED)                                    # the same values in every process
    @net = Gpt.new(**options.slice(:width, :depth, :heads, :length, :dropout))
    @size = @net.parameters.sum(&:numel)
    @model = Torch::Distributed::Parallel.new(@net, mesh: context.mesh, plan: Gpt.plan, stages: @net.stages(options[:pp]),
      schedule: options[:schedule], microbatches: options[:microbatches], shard: options[:shard], mixed_precision: options[:dtype],
      checkpoint_ratio: options[:checkpoint_ratio], loss_fn: Gpt.loss(context.mesh["tp"]))
    @optimizer = Torch::Optim::AdamW.new(@model.parameters, lr: options[:lr], fused: true)
    Torch.manual_seed(SEED + @model.data_rank)                 # replicas drop out different elements
  end

  def run
    say "#{@size} parameters, #{@text.numel} bytes of text, #{@model.description}"
    seconds = steps = 0
    (resume..@options[:steps]).each do |step|
      started = now
      loss = train(step)
      seconds += now - started
      steps += 1
      report(step, loss, steps * @options[:batch_size] * @options[:length] / seconds) if due?(step, :report_every)
      save(step) if due?(step, :checkpoint_every)
    end
    peaks
  end

  private

  def train(step)
    @optimizer.zero_grad
    inputs, targets = batch(step)
    loss = @model.step(inputs, target: targets)
    @model.clip_grad_norm_(1.0)
    @optimizer.step
    loss
  end

  # The rows of a step are the same, however they are shared among replicas.
  def batch(step)
    random = Random.new(SEED + step)
    rows = Array.new(@options[:batch_size]) { random.rand(@text.numel - @options[:length]) }
    own = rows.each_slice(rows.size / @model.data_size).to_a[@model.data_rank]
    [0, 1].map { |shift| Torch.stack(own.map { |row| @text.narrow(0, row + shift, @options[:length]) }) }
  end

  def due?(step, interval)
    (step % @options[interval]).zero? || step == @options[:steps]
  end

  def report(step, loss, rate)
    say format("step %<step>4d: loss %<loss>.3f, %<rate>d tokens/s", step: step, loss: loss, rate: rate)
    @model.eval
    text = @net.continue("The ", @options[:sample]) do |ids|
      Torch::Distributed::NN.gather_from_region(@model.call(ids), group: @context.mesh.get_group("tp"))
    end
    @model.train
    say "          #{text.dump}" if @options[:sample].positive?
  end

  # All that a run needs to go on; the step is in the checkpoint's name.
  def state
    {model: @model, optimizer: @optimizer}
  end

  def resume
    return 1 unless @options[:checkpoint]

    loaded = Checkpoint.load(@options[:checkpoint], **state, rng: false, required: false)
    say "going on after step #{loaded.step}, saved by #{loaded.world_size} processes" if loaded
    loaded ? loaded.step + 1 : 1
  end

  def save(step)
    Checkpoint.save(@options[:checkpoint], **state, step: step, keep: 2) if @options[:checkpoint]
  end

  def peaks
    all = Torch::Distributed.all_gather_object(Torch::Distributed.memory_stats[:peak_bytes] >> 20, serializer: :json)
    say "tensors took at most #{all.join(", ")} MiB on ranks 0 to #{all.size - 1}"
  end

  def now
    Process.clock_gettime(Process::CLOCK_MONOTONIC)
  end

  def say(text)
    puts text if @context.main?
  end
end

options = {dp: 1, tp: 1, pp: 1, shard: "no_shard", schedule: "1f1b", microbatches: nil, dtype: nil, checkpoint_ratio: 0.0, width: 128, depth: 4, heads: 4,
           length: 64, dropout: 0.0, batch_size: 16, steps: 1000, lr: 2e-3, text: "/usr/share/common-licenses/GPL-3", checkpoint: nil,
           checkpoint_every: 100, report_every: 200, sample: 60}
positive = %i[dp tp pp width depth heads length batch_size steps lr checkpoint_every report_every]
options = CommandLine.parse("torchrun --nproc-per-node=N examples/gpt/train.rb [options]", options, positive: positive) do |opts|
  opts.on("--dp N", Integer, "replicas, or shards, with a part of the data each (#{options[:dp]})")
  opts.on("--tp N", Integer, "processes that share every layer (#{options[:tp]})")
  opts.on("--pp N", Integer, "stages of layers, one after another (#{options[:pp]})")
  opts.on("--shard NAME", "no_shard, shard_grad_op or full_shard, along dp (#{options[:shard]})")
  opts.on("--schedule NAME", "of the pipeline: gpipe or 1f1b (#{options[:schedule]})")
  opts.on("--microbatches N", Integer, "parts of a replica's rows that go through the pipeline (4 times --pp)")
  opts.on("--dtype NAME", "in which layers are computed: bfloat16 (float32)")
  opts.on("--checkpoint-ratio R", Float, "share of the layers whose activations are computed again (#{options[:checkpoint_ratio]})")
  opts.on("--width N", Integer, "of the model (#{options[:width]})")
  opts.on("--depth N", Integer, "how many layers (#{options[:depth]})")
  opts.on("--heads N", Integer, "of each layer's attention (#{options[:heads]})")
  opts.on("--length N", Integer, "bytes that it looks back (#{options[:length]})")
  opts.on("--dropout P", Float, "(#{options[:dropout]})")
  opts.on("--batch-size N", Integer, "rows of a step, of all replicas together (#{options[:batch_size]})")
  opts.on("--steps N", Integer, "(#{options[:steps]})")
  opts.on("--lr RATE", Float, "learning rate (#{options[:lr]})")
  opts.on("--text FILE", "to train on (#{options[:text]})")
  opts.on("--checkpoint DIR", "folder of checkpoints; training goes on from the newest, whatever dimensions saved it")
  opts.on("--checkpoint-every N", Integer, "steps (#{options[:checkpoint_every]})")
  opts.on("--report-every N", Integer, "steps (#{options[:report_every]})")
  opts.on("--sample N", Integer, "bytes that it writes with each report (#{options[:sample]})")
end
unless (options[:batch_size] % options[:dp]).zero?
  CommandLine.refuse("--batch-size #{options[:batch_size]}: expected a multiple of --dp #{options[:dp]}")
end

$stdout.sync = true
Torch::Distributed.track_memory
Torch::Distributed.run(mesh: options.slice(:pp, :dp, :tp)) { |context| GptTraining.new(context, options).run }
