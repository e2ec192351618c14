# frozen_string_literal: true

require "torch/distributed"

# A transformer that predicts the next byte of a text. Its parts run one after another, so that a pipeline can cut it
# between any two of them; PLAN says how a tensor dimension divides each.
class Gpt < Torch::NN::Module
  # Bytes and their places, as vectors.
  class Embedding < Torch::NN::Module
    def initialize(vocabulary, length, width)
      super()
      @bytes = Torch::NN::Embedding.new(vocabulary, width)
      @places = Torch::NN::Embedding.new(length, width)
      [@bytes, @places].each { |each| Torch::NN::Init.normal!(each.weight, mean: 0.0, std: 0.02) }
    end

    def forward(ids)
      @bytes.call(ids) + @places.call(Torch.arange(0, ids.size(1), dtype: :int64, device: ids.device))
    end
  end

  # Each byte looks at those before it. The number of heads follows from what `qkv` gives, which is a part of them
  # where processes share the heads.
  class Attention < Torch::NN::Module
    def initialize(width, heads, dropout)
      super()
      @size = width / heads
      @qkv = Torch::NN::Linear.new(width, 3 * width)
      @out = Torch::NN::Linear.new(width, width)
      @dropout = Torch::NN::Dropout.new(p: dropout)
    end

    def forward(x)
      rows, length, = x.shape
      query, key, value = @qkv.call(x).view(rows, length, 3, -1, @size).permute(2, 0, 3, 1, 4).unbind(0)
      scores = query.matmul(key.transpose(-2, -1)) / Math.sqrt(@size)
      later = Torch.ones(length, length, device: x.device).triu(1).gt(0)
      seen = Torch::NN::F.softmax(scores.masked_fill(later, -Float::INFINITY), dim: -1).matmul(value)
      @dropout.call(@out.call(seen.transpose(1, 2).reshape(rows, length, -1)))
    end
  end

  # Two layers with a wider one between them.
  class Mlp < Torch::NN::Module
    def initialize(width, dropout)
      super()
      @up = Torch::NN::Linear.new(width, 4 * width)
      @down = Torch::NN::Linear.new(4 * width, width)
      @dropout = Torch::NN::Dropout.new(p: dropout)
    end

    def forward(x)
      @dropout.call(@down.call(Torch::NN::F.relu(@up.call(x))))
    end
  end

  # One layer of the transformer.
  class Block < Torch::NN::Module
    def initialize(width, heads, dropout)
      super()
      @norm1, @norm2 = Array.new(2) { Torch::NN::LayerNorm.new([width]) }
      @attention = Attention.new(width, heads, dropout)
      @mlp = Mlp.new(width, dropout)
    end

    def forward(x)
      x += @attention.call(@norm1.call(x))
      x + @mlp.call(@norm2.call(x))
    end
  end

  # A score for each byte that may follow.
  class Head < Torch::NN::Module
    def initialize(width, vocabulary)
      super()
      @norm = Torch::NN::LayerNorm.new([width])
      @scores = Torch::NN::Linear.new(width, vocabulary, bias: false)
    end

    def forward(x)
      @scores.call(@norm.call(x))
    end
  end

  attr_reader :length

  def initialize(width: 256, depth: 8, heads: 8, length: 128, vocabulary: 256, dropout: 0.0)
    super()
    @length = length
    @embedding = Embedding.new(vocabulary, length, width)
    @blocks = Torch::NN::ModuleList.new(Array.new(depth) { Block.new(width, heads, dropout) })
    @head = Head.new(width, vocabulary)
  end

  # How a tensor dimension divides it: heads and the wide layers, the vocabulary at both ends.
  #
  # @return [Hash{String => Object}] for Torch::Distributed::Parallel
  def self.plan
    ways = Torch::Distributed::Tensor::Parallel
    {
      "embedding.bytes" => ways::RowwiseParallel.new,
      "blocks.*.attention.qkv" => ways::ColwiseParallel.new(blocks: 3),
      "blocks.*.attention.out" => ways::RowwiseParallel.new,
      "blocks.*.mlp.up" => ways::ColwiseParallel.new,
      "blocks.*.mlp.down" => ways::RowwiseParallel.new,
      "head.scores" => ways::ColwiseParallel.new
    }
  end

  # The mean cross entropy of scores, of which each process of a tensor dimension has a part.
  #
  # @param mesh [Torch::Distributed::DeviceMesh, nil] the tensor dimension
  # @return [Proc] for Torch::Distributed::Parallel
  def self.loss(mesh)
    lambda do |scores, target|
      rows = scores.reshape(-1, scores.shape.last)
      rows = rows.to(dtype: :float32) if rows.dtype == :bfloat16
      next Torch::NN::F.cross_entropy(rows, target.reshape(-1)) unless mesh

      Torch::Distributed::Tensor::Parallel.cross_entropy(rows, target.reshape(-1), mesh: mesh)
    end
  end

  # @param count [Integer]
  # @return [Array<Array<String>>] the modules of each stage of a pipeline
  def stages(count)
    blocks = Array.new(@blocks.length) { |i| "blocks.#{i}" }
    stages = Array.new(count) { |i| blocks[(i * blocks.size / count)...((i + 1) * blocks.size / count)] }
    stages.first.unshift("embedding")
    stages.last.push("head")
    stages
  end

  # Writes on.
  #
  # @param text [String]
  # @param count [Integer] how many bytes are added
  # @yieldparam ids [Torch::Tensor] one row
  # @yieldreturn [Torch::Tensor] what {#forward} gives for them
  # @return [String]
  def continue(text, count)
    random = Random.new(1)
    count.times do
      ids = Torch.tensor([text.bytes.last(@length)], dtype: :int64)
      scores = Torch.no_grad { yield(ids)[0][-1].to(dtype: :float64) }
      text += draw(Torch::NN::F.softmax(scores / 0.6, dim: 0).to_a, random.rand).chr
    end
    text
  end

  # @param ids [Torch::Tensor] rows of bytes, int64
  # @return [Torch::Tensor] for each of them the scores of the byte after it
  def forward(ids)
    @head.call(@blocks.inject(@embedding.call(ids)) { |x, block| block.call(x) })
  end

  private

  # @return [Integer] the first byte up to which the chances add up to more than the number
  def draw(chances, number)
    chances.each_index.find { |byte| (number -= chances[byte]).negative? } || 32
  end
end
