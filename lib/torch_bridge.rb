# frozen_string_literal: true

require "torch/distributed"

# The names of the Python project TorchBridge, for what {Torch::Distributed} has. They are at the top level too, where nothing else
# has them.
#
#   context = MultiNodeTrainingManager.new.setup(num_nodes: 2, gpus_per_node: 8)
#   model = AdvancedFSDPManager.new(sharding_strategy: "FULL_SHARD", mixed_precision: true).wrap_model(model.to(context.device))
module TorchBridge
  ColumnParallelLinear = Torch::Distributed::Tensor::Parallel::ColumnParallelLinear
  RowParallelLinear = Torch::Distributed::Tensor::Parallel::RowParallelLinear
  PipelineStage = Torch::Distributed::Pipelining::PipelineStage
  SelectiveGradientCheckpointing = Torch::Utils::Checkpoint::SelectiveCheckpointing
  ShardingStrategy = Torch::Distributed::FSDP::ShardingStrategy

  # Fully sharded training by a few switches.
  class AdvancedFSDPManager
    FSDP = Torch::Distributed::FSDP
    private_constant :FSDP

    # @param sharding_strategy [String, Symbol] "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", or "HYBRID_SHARD": sharded within each
    #   machine, with replicas on the others
    # @param mixed_precision [Boolean, Torch::Distributed::FSDP::MixedPrecisionPolicy] true: computed in bfloat16, gradients reduced in
    #   float32
    # @param cpu_offload [Boolean] whether shards and the optimizer's state are in the CPU's memory
    # @param activation_checkpointing [Boolean] whether each layer's activations are computed again in backward
    # @param auto_wrap_policy [#call, nil] which modules are units, see {Torch::Distributed::FSDP::WrapPolicies}; nil: the layers of the
    #   model's largest list of layers, if it has one
    # @raise [ArgumentError] naming the switch that is wrong
    def initialize(sharding_strategy: "FULL_SHARD", mixed_precision: false, cpu_offload: false, activation_checkpointing: false,
      auto_wrap_policy: nil)
      @strategy = sharding_strategy.to_s.downcase.to_sym
      unless FSDP::ShardingStrategy::ALL.include?(@strategy)
        raise ArgumentError, "sharding_strategy: expected one of #{FSDP::ShardingStrategy::ALL.map { |name| name.to_s.upcase }.inspect}, " \
          "got #{sharding_strategy.inspect}"
      end
      {cpu_offload: cpu_offload, activation_checkpointing: activation_checkpointing}.each do |name, value|
        raise ArgumentError, "#{name}: expected true or false, got #{value.inspect}" unless [true, false].include?(value)
      end

      @precision = policy(mixed_precision)
      @cpu_offload = cpu_offload
      @checkpointing = activation_checkpointing
      @auto_wrap_policy = auto_wrap_policy
    end

    # A collective call of all processes of the default group. Make the optimizer afterwards.
    #
    # @param model [Torch::NN::Module] on its device
    # @return [Torch::Distributed::FSDP::FullyShardedDataParallel]
    # @raise [ArgumentError, TypeError] if the model cannot be sharded so; before anything is sent
    def wrap_model(model)
      raise TypeError, "model: expected a Torch::NN::Module, got #{model.inspect}" unless model.is_a?(Torch::NN::Module)
      raise Torch::Distributed::GroupError, "wrap_model needs a process group: call init_process_group or setup first" unless Torch::Distributed.initialized?

      SelectiveGradientCheckpointing.new(model, checkpoint_ratio: 1) if @checkpointing
      FSDP::FullyShardedDataParallel.new(model, sharding_strategy: @strategy, mixed_precision: @precision, cpu_offload: @cpu_offload,
        auto_wrap_policy: @auto_wrap_policy || layers_of(model), device_mesh: mesh(model))
    end

    private

    def policy(given)
      case given
      when true then FSDP::MixedPrecisionPolicy.new(param_dtype: :bfloat16, reduce_dtype: :float32)
      when false then nil
      when FSDP::MixedPrecisionPolicy then given
      else raise ArgumentError, "mixed_precision: expected true, false or a MixedPrecisionPolicy, got #{given.inspect}"
      end
    end

    def layers_of(model)
      layers = Torch::Utils::Checkpoint::Layers.of(model).values
      ->(mod, _name, _count) { layers.any? { |layer| layer.equal?(mod) } }
    end

    def mesh(model)
      return unless @strategy == :hybrid_shard

      size = Torch::Distributed.world_size
      local = Integer(Torch::Distributed.launch_variables.fetch("LOCAL_WORLD_SIZE", size))
      raise ArgumentError, "HYBRID_SHARD: expected the same number of processes on each machine, got #{local} of #{size}" unless (size % local).zero?

      type = model.parameters.first&.device.to_s.start_with?("cuda") ? "cuda" : "cpu"
      Torch::Distributed.init_device_mesh(type, [size / local, local], mesh_dim_names: %w[replicate shard])
    end
  end

  # Joins this process with the others of the job.
  class MultiNodeTrainingManager
    # @return [Torch::Distributed::RunContext, nil] this process's place; nil before {#setup}
    attr_reader :context

    # Reads what torchrun or a scheduler has set, makes the default process group, and finds this process's device. What
    # differs between machines is checked on all, and raised on all. Without a launcher it prints the torchrun commands for each
    # machine and ends the program with status 2, unless one process is all there is to be.
    #
    # @param num_nodes [Integer, nil] machines that the job must have; nil: any number
    # @param gpus_per_node [Integer, nil] GPUs and processes that each must have; nil: any number
    # @param options [Hash] `backend:`, `seed:`, `device:` and `timeout:` of {Torch::Distributed::Run#run}
    # @return [Torch::Distributed::RunContext]
    # @raise [ArgumentError, TypeError] naming the argument, what it is and what was expected
    # @raise [Torch::Distributed::GroupError] if there is a default process group already
    def setup(num_nodes: nil, gpus_per_node: nil, **options)
      @context = Torch::Distributed.send(:enter_world, nodes: num_nodes, gpus_per_node: gpus_per_node, **options)
    end

    # Ends the process group. It ends with the process in any case.
    #
    # @return [nil]
    def cleanup
      Torch::Distributed.destroy_process_group
    end
  end
end

(TorchBridge.constants - Object.constants).each { |name| Object.const_set(name, TorchBridge.const_get(name)) }
