# frozen_string_literal: true

require "torch"

# ResNet-18 of the torchvision gem, for grey pictures. Only the gem's models are loaded: its data sets and
# transforms need libvips, which MNIST can do without.
module DigitsResNet
  PARTS = %w[basic_block bottleneck resnet].freeze
  CURE = "the gem torchvision is not in the bundle. Install it with `BUNDLE_WITH=vision bundle install`, and have " \
    "BUNDLE_WITH=vision in the environment also when running (`export BUNDLE_WITH=vision`); `rake resnet` does both"

  module_function

  # @param classes [Integer]
  # @return [Torch::NN::Module] it takes pictures of one channel
  # @raise [LoadError] without the gem, with what to do
  def build(classes: 10)
    load_models
    models = TorchVision::Models
    net = models::ResNet.new(models::BasicBlock, [2, 2, 2, 2], classes)
    net.conv1 = Torch::NN::Conv2d.new(1, 64, 7, stride: 2, padding: 3, bias: false)
    net
  end

  # @raise [LoadError]
  def load_models
    PARTS.each { |part| require "torchvision/models/#{part}" }
  rescue LoadError => e
    raise unless e.path.to_s.start_with?("torchvision/")

    raise LoadError, CURE
  end
end
