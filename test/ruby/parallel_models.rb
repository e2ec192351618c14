# frozen_string_literal: true

require_relative "test_helper"
require "json"

# Models that are divided between processes, beside the same ones that are not.
module ParallelModels
  Tensor = Torch::Distributed::Tensor
  Parallel = Tensor::Parallel
  ColwiseParallel = Parallel::ColwiseParallel
  RowwiseParallel = Parallel::RowwiseParallel
  SequenceParallel = Parallel::SequenceParallel

  class Mlp < Torch::NN::Module
    attr_reader :up, :down

    def initialize(width, hidden)
      super()
      @up = Torch::NN::Linear.new(width, hidden)
      @down = Torch::NN::Linear.new(hidden, width)
    end

    def forward(x)
      @down.call(Torch.tanh(@up.call(x)))
    end
  end

  # Of as many heads as the projected features are.
  class Attention < Torch::NN::Module
    def initialize(width, head_size, fused:, dropout:)
      super()
      @head_size = head_size
      if fused
        @qkv = Torch::NN::Linear.new(width, 3 * width)
      else
        @query = Torch::NN::Linear.new(width, width)
        @key = Torch::NN::Linear.new(width, width)
        @value = Torch::NN::Linear.new(width, width)
      end
      @out = Torch::NN::Linear.new(width, width)
      @dropout = Torch::NN::Dropout.new(p: dropout)
    end

    def forward(x)
      batch = x.shape[0]
      projected = @qkv ? @qkv.call(x).chunk(3, -1) : [@query, @key, @value].map { |each| each.call(x) }
      length = projected[0].shape[1]
      query, key, value = projected.map { |each| each.view(batch, length, -1, @head_size).transpose(1, 2) }
      weights = @dropout.call(Torch.softmax(query.matmul(key.transpose(-2, -1)) / Math.sqrt(@head_size), -1))
      @out.call(weights.matmul(value).transpose(1, 2).reshape(batch, length, -1))
    end
  end

  class Block < Torch::NN::Module
    def initialize(width, head_size, fused:, dropout:)
      super()
      @norm1 = Torch::NN::LayerNorm.new(width)
      @attention = Attention.new(width, head_size, fused: fused, dropout: dropout)
      @norm2 = Torch::NN::LayerNorm.new(width)
      @mlp = Mlp.new(width, 4 * width)
      @dropout = Torch::NN::Dropout.new(p: dropout)
    end

    def forward(x)
      x += @attention.call(@norm1.call(x))
      x + @dropout.call(@mlp.call(@norm2.call(x)))
    end
  end

  # With a head that has the embedding's weight.
  class Gpt < Torch::NN::Module
    attr_reader :layers, :embedding, :head
    attr_accessor :checkpointed

    def initialize(vocabulary: 24, width: 24, head_size: 2, length: 12, depth: 2, fused: true, dropout: 0.0)
      super()
      @embedding = Torch::NN::Embedding.new(vocabulary, width)
      @position = Torch::NN::Embedding.new(length, width)
      @layers = Torch::NN::ModuleList.new(Array.new(depth) { Block.new(width, head_size, fused: fused, dropout: dropout) })
      @norm = Torch::NN::LayerNorm.new(width)
      @head = Torch::NN::Linear.new(width, vocabulary, bias: false)
      tie
    end

    def tie
      @head.instance_variable_set(:@weight, @embedding.weight)
    end

    def forward(ids)
      x = @embedding.call(ids) + @position.call(Torch.arange(ids.shape[1], dtype: :int64, device: ids.device))
      @layers.each { |layer| x = checkpointed ? Torch::Utils::Checkpoint.checkpoint(layer, x) : layer.call(x) }
      @head.call(@norm.call(x))
    end
  end

  QKV = {true => %w[attention.qkv], false => %w[attention.query attention.key attention.value]}.freeze

  def gpt_plan(fused: true, heads: 12)
    plan = {
      "embedding" => RowwiseParallel.new, "head" => ColwiseParallel.new,
      "layers.*.attention.out" => RowwiseParallel.new, "layers.*.mlp.up" => ColwiseParallel.new, "layers.*.mlp.down" => RowwiseParallel.new
    }
    QKV.fetch(fused).each { |name| plan["layers.*.#{name}"] = ColwiseParallel.new(blocks: fused ? 3 : 1, heads: heads) }
    plan
  end

  def sequence_plan(fused: true)
    sequence = Tensor.shard(1)
    inside = Tensor.replicate(gradient: :partial)
    plan = {
      "embedding" => RowwiseParallel.new(output_layouts: sequence),
      "position" => Parallel::PrepareModuleOutput.new(output_layouts: Tensor.replicate, desired_output_layouts: Tensor.shard(0)),
      "layers.*.norm[12]" => SequenceParallel.new, "layers.?.dropout" => SequenceParallel.new, "norm" => SequenceParallel.new,
      "layers.*.attention.dropout" => SequenceParallel.new,
      "head" => ColwiseParallel.new(input_layouts: sequence),
      "layers.*.attention.out" => RowwiseParallel.new(output_layouts: sequence),
      "layers.*.mlp.up" => ColwiseParallel.new(input_layouts: sequence),
      "layers.*.mlp.down" => RowwiseParallel.new(output_layouts: sequence)
    }
    plan["layers.*.attention"] = Parallel::PrepareModuleInput.new(input_layouts: sequence, desired_input_layouts: inside) unless fused
    QKV.fetch(fused).each do |name|
      plan["layers.*.#{name}"] = ColwiseParallel.new(blocks: fused ? 3 : 1, input_layouts: fused ? sequence : inside)
    end
    plan
  end

  # The same values on all ranks.
  def make(seed: 1)
    Torch.manual_seed(seed)
    model = yield
    model.double
    # A conversion makes other parameters, and so unties them.
    model.tie if model.respond_to?(:tie)
    model
  end

  def mesh(size)
    Torch::Distributed.init_device_mesh("cpu", [size])
  end

  # What all processes have of a tensor that is as the parameter.
  def full(parameter, tensor = parameter)
    layout = Tensor.layout(parameter)
    layout ? layout.gather(tensor.detach) : tensor.detach
  end

  # The largest difference of parameters, or of their gradients, relative to the largest value.
  def difference(plain, model)
    names = model.named_parameters
    plain.named_parameters.map do |name, parameter|
      one, two = yield(parameter, parameter), yield(names.fetch(name), names.fetch(name))
      (one - two).abs.max.item / [one.abs.max.item, 1e-3].max
    end.max
  end

  # Trains both for some steps.
  #
  # @yieldparam model [Torch::NN::Module]
  # @yieldparam step [Integer]
  # @yieldparam divided [Boolean]
  # @yieldreturn [Torch::Tensor] the loss
  # @return [Array<Float>] the largest relative differences of losses, of gradients and of parameters afterwards
  def follow(plain, model, steps: 4)
    optimizers = [plain, model].map { |each| Torch::Optim::Adam.new(each.parameters.uniq(&:object_id), lr: 0.01, eps: 1e-5) }
    losses = gradients = 0
    steps.times do |step|
      optimizers.each(&:zero_grad)
      expected, actual = [plain, model].map { |each| yield(each, step, each.equal?(model)).tap(&:backward) }
      losses = [losses, (expected.item - actual.item).abs / expected.item.abs].max
      gradients = [gradients, difference(plain, model) { |parameter, _| full(parameter, parameter.grad) }].max
      optimizers.each(&:step)
    end
    [losses, gradients, difference(plain, model) { |parameter, _| full(parameter) }]
  end

  def numbers(*shape, seed: 0)
    (Torch.arange(0, shape.inject(:*), dtype: :float64) * 0.731 + seed * 1.37).sin.reshape(shape)
  end

  def tokens(batch, length, vocabulary, seed: 0)
    (Torch.arange(0, batch * length, dtype: :int64) * 7 + seed * 5 + 3).remainder(vocabulary).reshape([batch, length])
  end

  # How many operations of each kind the default group executes during the block.
  #
  # @return [Hash{String => Integer}]
  def operations
    before = recorded
    yield
    recorded.drop(before.size).tally
  end

  def recorded
    Dir.mktmpdir do |folder|
      Torch::Distributed.dump_flight_recorder("#{folder}/")
      entries = JSON.parse(File.read(Dir["#{folder}/*"].first)).fetch("entries")
      entries.map { |entry| entry.fetch("profiling_name").split(":").last }
    end
  end
end
