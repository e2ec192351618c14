# frozen_string_literal: true

require_relative "test_helper"
require_relative "../../examples/gpt/model"

# A GPT that is divided by every dimension of a mesh, beside one that is trained by one process.
module ParallelTraining
  Checkpoint = Torch::Distributed::Checkpoint
  # Twelve heads, and a vocabulary that two, three and four processes can share.
  SIZES = {width: 24, depth: 4, heads: 12, length: 5, vocabulary: 24}.freeze
  ROWS = 12

  class << self
    # @return [String] where models and data are
    attr_accessor :device
  end
  self.device = "cpu"

  module_function

  # @param tied [Boolean] whether the first and the last layer have the same weight
  def net(dtype, tied: false)
    Torch.manual_seed(1)
    model = Gpt.new(**SIZES)
    model.double if dtype == :float64
    model.to(ParallelTraining.device)
    model.head.scores.instance_variable_set(:@weight, model.embedding.bytes.weight) if tied
    model
  end

  def batch(step)
    random = Random.new(step)
    Array.new(2) do
      rows = Array.new(ROWS) { Array.new(SIZES[:length]) { random.rand(SIZES[:vocabulary]) } }
      Torch.tensor(rows, dtype: :int64).to(ParallelTraining.device)
    end
  end

  # Adam makes full steps of gradients that are nothing but rounding, as those of the keys' biases are: with float32 they would decide.
  def optimizer(parameters)
    return Torch::Optim::SGD.new(parameters, lr: 0.3, momentum: 0.9) if parameters.first.dtype == :float32

    Torch::Optim::Adam.new(parameters, lr: 0.01)
  end

  # @return [Array(Array<Float>, Hash{String => Torch::Tensor})] losses and parameters of one process
  def plain(steps, dtype, clip, tied: false)
    model = net(dtype, tied: tied)
    optimizer = optimizer(model.parameters.uniq(&:object_id))
    losses = Array.new(steps) do |step|
      ids, target = batch(step)
      optimizer.zero_grad
      loss = Torch::NN::F.cross_entropy(model.call(ids).view(-1, SIZES[:vocabulary]), target.view(-1))
      loss.backward
      Torch::NN::Utils.clip_grad_norm_(model.parameters.uniq(&:object_id), clip) if clip
      optimizer.step
      loss.item
    end
    [losses, model.state_dict]
  end

  # @param dims [Hash{Symbol => Integer}] of the mesh
  # @return [Array(Parallel, Torch::Optim::Optimizer)]
  def divided(dims, dtype, microbatches: 4, stages: 1, tied: false, **options)
    mesh = Torch::Distributed.init_device_mesh(ParallelTraining.device[/\A\w+/], dims.values, mesh_dim_names: dims.keys)
    model = net(dtype, tied: tied)
    pp = dims.fetch(:pp, 1)
    parallel = Torch::Distributed::Parallel.new(model, mesh: mesh, plan: Gpt.plan, stages: (model.stages(pp * stages) if pp * stages > 1),
      microbatches: (microbatches if pp > 1), loss_fn: Gpt.loss(dims.key?(:tp) ? mesh["tp"] : nil), **options)
    [parallel, optimizer(parallel.parameters.uniq(&:object_id))]
  end

  def train(parallel, optimizer, steps, clip)
    steps.map do |step|
      parts = batch(step).map { |tensor| tensor.chunk(parallel.data_size)[parallel.data_rank] }
      optimizer.zero_grad
      loss = parallel.step(parts.first, target: parts.last)
      parallel.clip_grad_norm_(clip) if clip
      optimizer.step
      loss
    end
  end

  # Trains a divided model, and takes its parameters through a checkpoint.
  #
  # @return [Float] how much its losses and parameters differ from those of one process, relative to the largest
  def difference(folder, expected, dims, dtype, steps, clip, **options)
    losses, state = expected
    parallel, optimizer = divided(dims, dtype, **options)
    actual = train(parallel, optimizer, 0...steps, clip)
    Checkpoint.save(folder, model: parallel, optimizer: optimizer, step: steps)
    model = net(dtype, tied: options.fetch(:tied, false))
    Checkpoint.load(folder, model: model)
    [losses.zip(actual).map { |one, other| (one - other).abs / one.abs }.max, compare(state, model.state_dict)].max
  end

  def compare(state, other)
    state.map do |name, tensor|
      (tensor.detach - other.fetch(name).detach).abs.max.item / [tensor.detach.abs.max.item, 1e-30].max
    end.max
  end
end
