# frozen_string_literal: true

# What scripts for torch-dl 0.1 need: `DataParallel` at the top level, and `TorchDL`.
require "torch/nn/parallel/data_parallel"

# The names of torch-dl.
module TorchDL
  # The classes of neural networks.
  module NN
    # A {Torch::NN::Parallel::DataParallel} whose parameters and state have the module's own names, without "module.".
    class DataParallel < Torch::NN::Parallel::DataParallel
      # @return [Array<Integer, String, Torch::Device>] as they were given; nil given: the numbers of all GPUs
      attr_reader :device_ids

      # @see Torch::NN::Parallel::DataParallel#initialize
      def initialize(mod, device_ids: nil, **options)
        super
        @device_ids = device_ids || (0...devices.size).to_a
      end

      # Runs backward from the loss that the last call returned. After a call that returned none it does nothing, as in
      # torch-dl, where this only adds the gradients up then: the loss that is made of the outputs has a backward of its own.
      #
      # @param scale [Numeric] what the loss is multiplied by
      # @return [nil]
      def backward(scale: 1.0)
        super if @loss
      end

      # Does nothing: backward has added the gradients of all devices up in the module's.
      #
      # @return [nil]
      def reduce_gradients
      end

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

  # See {TorchDL::NN::DataParallel}.
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

# See {TorchDL::NN::DataParallel}.
DataParallel = TorchDL::DataParallel unless defined?(DataParallel)
