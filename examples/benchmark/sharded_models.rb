# frozen_string_literal: true

require "torch/distributed"

# The models of compare_fsdp.rb. The same stand in fsdp_step.py for PyTorch.
module ShardedModels
  # Eight layers of 512 with ReLU, where communicating decides.
  class Layers < Torch::NN::Module
    WIDTH = 512

    attr_reader :units

    def initialize
      super
      @units = Torch::NN::ModuleList.new(
        Array.new(8) { Torch::NN::Sequential.new(Torch::NN::Linear.new(WIDTH, WIDTH), Torch::NN::ReLU.new) }
      )
    end

    def forward(x)
      @units.each { |unit| x = unit.call(x) }
      x
    end

    def batch(size)
      [Torch.randn(size, WIDTH), Torch.randn(size, WIDTH)]
    end

    def loss(output, target)
      Torch::NN::F.mse_loss(output, target)
    end
  end

  # A block of a transformer.
  class Block < Torch::NN::Module
    def initialize(width, heads)
      super()
      @width = width
      @heads = heads
      @ln1, @ln2 = Array.new(2) { Torch::NN::LayerNorm.new([width]) }
      @qkv = Torch::NN::Linear.new(width, 3 * width)
      @proj = Torch::NN::Linear.new(width, width)
      @up = Torch::NN::Linear.new(width, 4 * width)
      @down = Torch::NN::Linear.new(4 * width, width)
    end

    def forward(x, mask)
      x += @proj.call(attention(@qkv.call(@ln1.call(x)), mask))
      x + @down.call(Torch::NN::F.relu(@up.call(@ln2.call(x))))
    end

    private

    def attention(qkv, mask)
      rows, length, = qkv.shape
      parts = Array.new(3) { |i| qkv.narrow(2, i * @width, @width).reshape(rows, length, @heads, @width / @heads).transpose(1, 2) }
      scores = parts[0].matmul(parts[1].transpose(-2, -1)) / Math.sqrt(@width / @heads) + mask
      Torch::NN::F.softmax(scores, dim: -1).matmul(parts[2]).transpose(1, 2).reshape(rows, length, @width)
    end
  end

  # A GPT of 10.9 million parameters, where computing decides.
  class Gpt < Torch::NN::Module
    VOCABULARY = 256
    WIDTH = 384
    LENGTH = 128

    attr_reader :units

    def initialize
      super
      @wte = Torch::NN::Embedding.new(VOCABULARY, WIDTH)
      @wpe = Torch::NN::Embedding.new(LENGTH, WIDTH)
      @units = Torch::NN::ModuleList.new(Array.new(6) { Block.new(WIDTH, 6) })
      @norm = Torch::NN::LayerNorm.new([WIDTH])
      @head = Torch::NN::Linear.new(WIDTH, VOCABULARY, bias: false)
      @positions = Torch.arange(0, LENGTH, dtype: :int64)
      @mask = Torch.triu(Torch.ones(LENGTH, LENGTH), 1) * -1e9
    end

    def forward(ids)
      x = @wte.call(ids) + @wpe.call(@positions)
      @units.each { |unit| x = unit.call(x, @mask) }
      @head.call(@norm.call(x))
    end

    def batch(size)
      Array.new(2) { Torch.randint(0, VOCABULARY, [size, LENGTH], dtype: :int64) }
    end

    def loss(output, target)
      Torch::NN::F.cross_entropy(output.view(-1, VOCABULARY), target.view(-1))
    end
  end

  NAMES = {"layers" => Layers, "gpt" => Gpt}.freeze
end
