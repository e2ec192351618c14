# frozen_string_literal: true

# What scripts for torch-dl 0.1 need: `DataParallel` at the top level, and `TorchDL`.
require "torch/nn/parallel/data_parallel"

# The names of torch-dl.
module TorchDL
  DataParallel = Torch::NN::DataParallel

  class << self
    # @param tensor [Torch::Tensor]
    # @param devices [Array<Integer, String, Torch::Device>]
    # @param dim [Integer]
    # @return [Array<Torch::Tensor>] a part for each device, fewer if there are fewer samples
    def scatter(tensor, devices, dim = 0)
      Torch::NN::Parallel.scatter(tensor, devices, dim)
    end

    # @param tensors [Array<Torch::Tensor>]
    # @param device [Integer, String, Torch::Device]
    # @param dim [Integer]
    # @return [Torch::Tensor]
    def gather(tensors, device, dim = 0)
      Torch::NN::Parallel.gather(tensors, device, dim)
    end
  end
end

DataParallel = Torch::NN::DataParallel unless defined?(DataParallel)
