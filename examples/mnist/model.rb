# frozen_string_literal: true

require "torch"

# The convolutional network of PyTorch's MNIST example: about 1.2 million parameters.
class MNISTNet < Torch::NN::Module
  def initialize
    super
    @conv1 = Torch::NN::Conv2d.new(1, 32, 3, stride: 1)
    @conv2 = Torch::NN::Conv2d.new(32, 64, 3, stride: 1)
    @dropout1 = Torch::NN::Dropout.new(p: 0.25)
    @dropout2 = Torch::NN::Dropout.new(p: 0.5)
    @fc1 = Torch::NN::Linear.new(9216, 128)
    @fc2 = Torch::NN::Linear.new(128, 10)
  end

  def forward(x)
    x = Torch::NN::F.relu(@conv1.call(x))
    x = Torch::NN::F.relu(@conv2.call(x))
    x = @dropout1.call(Torch::NN::F.max_pool2d(x, 2))
    x = Torch::NN::F.relu(@fc1.call(Torch.flatten(x, start_dim: 1)))
    Torch::NN::F.log_softmax(@fc2.call(@dropout2.call(x)), 1)
  end
end
