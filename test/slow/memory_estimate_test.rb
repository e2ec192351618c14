# frozen_string_literal: true

require_relative "../ruby/test_helper"
require_relative "../ruby/documented"

# The table in docs/large-models.md: activations and temporaries depend on the batch, all else on the model.
class DocumentedEstimateTest < Minitest::Test
  include Documented

  MIB = 1 << 20

  class Block < Torch::NN::Module
    def initialize(width)
      super()
      @norms = Torch::NN::ModuleList.new(Array.new(2) { Torch::NN::LayerNorm.new(width) })
      @linears = Torch::NN::ModuleList.new([[1, 3], [1, 1], [1, 4], [4, 1]].map { |from, to| Torch::NN::Linear.new(from * width, to * width) })
    end
  end

  # The parameters of the smallest GPT-2, whose head is its embedding.
  class Gpt2 < Torch::NN::Module
    def initialize(width: 768)
      super()
      @words, @positions = [50_257, 1024].map { |count| Torch::NN::Embedding.new(count, width) }
      @blocks = Torch::NN::ModuleList.new(Array.new(12) { Block.new(width) })
      @norm = Torch::NN::LayerNorm.new(width)
    end
  end

  def test_the_table
    title, names, *rows, limit = Documented.fences("docs/large-models.md").map(&:last).find { |text| text.include?("fused_adamw\n") }.lines.map(&:chomp)
    made = Distributed.estimate_memory(Gpt2.new, optimizer: :fused_adamw, world_size: 4, limit: 2 << 30)
    assert_equal [title, limit], made.to_s.lines.map(&:chomp).values_at(0, -1)
    assert_equal %w[parameters gradients optimizer unsharded activations temporaries total fits], names.split.drop(4)
    rows.map(&:split).each do |strategy, *numbers, fits|
      *parts, total = numbers.map { |text| Float(text) }
      row = made[strategy.to_sym]
      assert_equal row.to_h.values_at(:parameters, :gradients, :optimizer, :unsharded).map { |bytes| bytes.fdiv(MIB).round(1) }, parts.first(4), strategy
      assert_in_delta parts.sum, total, 0.3, strategy
      assert_equal (total <= 2048) ? "yes" : "no", fits
    end
    assert_equal %w[no_shard zero shard_grad_op full_shard], rows.map { |row| row[/\w+/] }
  end
end
