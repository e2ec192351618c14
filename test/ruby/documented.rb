# frozen_string_literal: true

require_relative "test_helper"

# What tests of the Ruby in README.md and docs have in common.
module Documented
  ROOT = File.expand_path("../..", __dir__)
  PAGES = ["README.md", *Dir[File.join(ROOT, "docs/*.md")].map { |path| "docs/#{File.basename(path)}" }.sort].freeze

  # Pages whose programs are whole: test/slow/docs_as_copied_test.rb copies and starts them as a reader does.
  WHOLE = ["README.md", "docs/getting-started.md"].freeze

  # @return [Array<String>] the blocks of the other pages, parts of programs, each once
  def self.blocks
    (PAGES - WHOLE).flat_map { |page| fences(page).filter_map { |kind, text| text if kind == "ruby" } }.uniq
  end

  # @return [Array<Array(String, String)>] what a page has between fences: the word behind the first one, and the text
  def self.fences(page)
    text(page).scan(/^```(\w*)\n(.*?)^```$/m)
  end

  # @param page [String] its path
  def self.text(page)
    File.read(File.join(ROOT, page))
  end

  # What the pages call so.
  class MyModel < Torch::NN::Module
    def initialize
      super
      @norm = Torch::NN::BatchNorm1d.new(4)
      @layers = Torch::NN::Sequential.new(Torch::NN::Linear.new(4, 3))
    end

    def forward(x)
      @layers.call(@norm.call(x))
    end
  end

  # A layer and the one that undoes it.
  class Pair < Torch::NN::Module
    def initialize
      super
      @up = Torch::NN::Linear.new(4, 6)
      @down = Torch::NN::Linear.new(6, 4)
    end

    def forward(x)
      @down.call(Torch::NN::F.relu(@up.call(x)))
    end
  end

  # What a pipeline's stages and a plan's names are of.
  class Pairs < Torch::NN::Module
    attr_reader :layers

    def initialize
      super
      @layers = Torch::NN::ModuleList.new(Array.new(2) { Pair.new })
    end

    def forward(x)
      @layers.inject(x) { |value, layer| layer.call(value) }
    end
  end

  def setup
    super
    Torch.manual_seed(1)
  end

  # @param words [String] that one block of the pages contains, and no other
  # @return [String] the block
  def code(words)
    found = Documented.blocks.select { |block| block.include?(words) }
    assert_equal 1, found.size, "blocks of the pages that contain #{words}"
    found.first
  end

  def dataset
    Torch::Utils::Data::TensorDataset.new(Torch.randn(96, 4), Torch.arange(96) % 3)
  end

  # Methods that its lines call.
  def loss(output)
    output.sum
  end

  def train(batch)
    @model.call(batch).sum.backward
  end
end
