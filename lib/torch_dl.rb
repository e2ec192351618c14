# frozen_string_literal: true

# What scripts for torch-dl 0.1 need: `DataParallel` at the top level, and `TorchDL`.
require "torch/nn/parallel/data_parallel"

# The names of torch-dl.
module TorchDL
  module NN
    # A {Torch::NN::Parallel::DataParallel} whose parameters and state have the module's own names, without "module.".
    class DataParallel < Torch::NN::DataParallel
      # @see Torch::NN::Module
      def named_parameters(**options)
        @module.named_parameters(**options)
      end

      # @see Torch::NN::Module
      def state_dict(**options)
        @module.state_dict(**options)
      end
    end
  end

  DataParallel = NN::DataParallel

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

DataParallel = TorchDL::DataParallel unless defined?(DataParallel)
