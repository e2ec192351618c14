# frozen_string_literal: true

module Torch
  module Distributed
    # Algorithms on top of the operations.
    module Algorithms
      autoload :Join, "torch/distributed/algorithms/join"
      autoload :JoinHook, "torch/distributed/algorithms/join"
      autoload :Joinable, "torch/distributed/algorithms/join"
      autoload :DDPCommHooks, "torch/distributed/algorithms/ddp_comm_hooks"
      autoload :ModelAveraging, "torch/distributed/algorithms/model_averaging"
    end

    # Optimizers that work on several processes.
    module Optim
      autoload :PostLocalSGDOptimizer, "torch/distributed/optim/post_local_sgd_optimizer"
      autoload :ZeroRedundancyOptimizer, "torch/distributed/optim/zero_redundancy_optimizer"
    end
  end
end
