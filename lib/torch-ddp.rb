# frozen_string_literal: true

require "torch/distributed"
require "torch/nn/parallel/distributed_data_parallel"
require "torch/torchrun"
require "torch/utils/data/distributed_sampler"
