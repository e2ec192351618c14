# frozen_string_literal: true

require "torch_ddp/rice_keys"
require "torch"
begin
  require "torch_ddp/ext"
rescue LoadError => e
  raise unless e.path == "torch_ddp/ext"

  raise LoadError, "#{e.message}: the extension is not built. In a checkout, also one that a Gemfile names with path:, run " \
    "`rake compile` there; an installed gem is built anew by `gem pristine torch-ddp`."
end
require "torch_ddp/printable"
require "torch_ddp/torch_rb"
require "torch_ddp/passing_error"
require_relative "distributed/errors"
require_relative "distributed/log"
require_relative "distributed/reduce_op"
require_relative "distributed/stores"
require_relative "distributed/meeting"
require_relative "distributed/work"
require_relative "distributed/future"
require_relative "distributed/grad_bucket"
require_relative "distributed/nested"
require_relative "distributed/devices"
require_relative "distributed/schedulers"
require_relative "distributed/rendezvous"
require_relative "distributed/ranks"
require_relative "distributed/process_group"
require_relative "distributed/backend"
require_relative "distributed/groups"
require_relative "distributed/agreement"
require_relative "distributed/subgroups"
require_relative "distributed/device_mesh"
require_relative "distributed/debug"
require_relative "distributed/operands"
require_relative "distributed/collectives"
require_relative "distributed/pieces"
require_relative "distributed/point_to_point"
require_relative "distributed/coalescing"
require_relative "distributed/shared_tensors"
require_relative "distributed/forks"
require_relative "distributed/objects"
require_relative "distributed/group_operations"
require_relative "distributed/random_state"
require_relative "distributed/random_streams"
require_relative "distributed/optim/state_dict"
require_relative "distributed/optim/fused"
require_relative "distributed/local_piece"
require_relative "nn/utils/clip_grad"
require_relative "distributed/algorithms"
require_relative "distributed/function"
require_relative "distributed/weight_gradients"
require_relative "distributed/gradient_hooks"
require_relative "distributed/backward_errors"
require_relative "utils/checkpoint"
require_relative "distributed/fork_world"
require_relative "distributed/step_memory"
require_relative "distributed/memory_stats"
require_relative "distributed/flight_recorder"
require_relative "distributed/trace"
require_relative "distributed/elastic"
require_relative "distributed/full_state_dict"
require_relative "distributed/run"

# torch-rb's module.
module Torch
  # Training on several processes: process groups, collectives and the stores by which processes meet.
  #
  #   require "torch/distributed"
  #
  #   Torch::Distributed.init_process_group          # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
  #   tensor = Torch.ones(3)
  #   Torch::Distributed.all_reduce(tensor)          # now world_size everywhere
  #   Torch::Distributed.destroy_process_group
  module Distributed
    autoload :Checkpoint, "torch/distributed/checkpoint"
    autoload :CheckpointError, "torch/distributed/checkpoint"
    autoload :FSDP, "torch/distributed/fsdp"
    autoload :GradScaler, "torch/distributed/grad_scaler"
    autoload :MemoryEstimate, "torch/distributed/memory_estimate"
    autoload :NN, "torch/distributed/nn"
    autoload :Parallel, "torch/distributed/parallel"
    autoload :Pipelining, "torch/distributed/pipelining"
    autoload :Tensor, "torch/distributed/tensor"

    extend Log
    extend Devices
    extend Ranks
    extend Groups
    extend Subgroups
    extend Meshes
    extend Debug
    extend Operands
    extend Collectives
    extend Pieces
    extend PointToPoint
    extend Coalescing
    extend SharedTensors
    extend Objects
    extend GradientHooks
    extend RandomState
    extend Launching
    extend Run
    extend KeptMemory
    extend MemoryStats
    extend FlightRecorder
    extend Trace
    extend FullStateDict

    set_debug_level_from_env
  end
end

TorchDDP::TorchRb.complete

module Torch
  # torch-rb's layers, and what is added to them here.
  module NN
    autoload :DataParallel, "torch/nn/parallel/data_parallel"
    autoload :SyncBatchNorm, "torch/nn/sync_batch_norm"

    # Models that train on several devices or processes.
    module Parallel
      autoload :DataParallel, "torch/nn/parallel/data_parallel"
      autoload :DistributedDataParallel, "torch/nn/parallel/distributed_data_parallel"
      autoload :MixedPrecision, "torch/nn/parallel/mixed_precision"
    end
  end

  # torch-rb's module of tools, and what is added to them here.
  module Utils
    # Datasets and loaders.
    module Data
      autoload :DistributedSampler, "torch/utils/data/distributed_sampler"
      autoload :DistributedDataLoader, "torch/utils/data/distributed_data_loader"
    end
  end
end
