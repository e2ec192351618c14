# frozen_string_literal: true

# Stands in for the gem torchvision, which needs libvips: a set of images from a few numbers, in MNIST's shapes.
require "torch"

module TorchVision
  module Transforms
    Compose = Struct.new(:transforms)
    ToTensor = Class.new
    Normalize = Struct.new(:mean, :std)
  end

  module Datasets
    class MNIST < Torch::Utils::Data::Dataset
      def initialize(_root, train: true, download: false, transform: nil)
        super()
        Torch.manual_seed(train ? 1 : 2)
        @size = Integer(ENV.fetch("STAND_IN_IMAGES", "256")) / (train ? 1 : 4)
        @labels = Array.new(@size) { |i| i % 10 }
        # Each digit has a brighter row of its own.
        @images = Torch.randn(@size, 1, 28, 28) * 0.1
        @labels.each_with_index { |label, i| @images[i][0][2 * label].add!(3) }
      end

      attr_reader :size

      def [](index)
        [@images[index], @labels[index]]
      end
    end
  end
end
