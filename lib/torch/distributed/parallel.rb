# frozen_string_literal: true

require_relative "../distributed"
require_relative "tensor"
require_relative "pipelining"

module Torch
  module Distributed
    # A model that is divided in several ways at once, by the dimensions of a mesh:
    #
    # - "dp": each process has a part of the data, and a replica of the model, or a shard of it (`shard:`); instead of it
    #   "dp_replicate" and "dp_shard" for replicas of shards
    # - "tp": processes share each layer, as `plan:` says
    # - "pp": processes have one layer after the other, as `stages:` says
    #
    # Each may be missing, or of one process.
    #
    #   mesh = Torch::Distributed.init_device_mesh("cpu", [2, 2, 2], mesh_dim_names: %w[pp dp tp])
    #   model = Torch::Distributed::Parallel.new(net, mesh: mesh, plan: plan, stages: [%w[embedding blocks.0], %w[blocks.1 head]],
    #     shard: :full_shard, loss_fn: loss)
    #   optimizer = Torch::Optim::AdamW.new(model.parameters, lr: 1e-3)
    #
    #   loss = model.step(inputs, target: targets)         # forward and backward
    #   model.clip_grad_norm_(1.0)
    #   optimizer.step
    #
    # The processes of one (pp, tp) plane get the same data; {#data_rank} and {#data_size} are for a sampler. A checkpoint
    # of the model and its optimizer goes from any mesh to any other, and into the plain model.
    class Parallel < Torch::NN::Module
      # @return [Torch::NN::Module] the model that was given, of which this process has a part
      attr_reader :module

      # @return [DeviceMesh]
      attr_reader :mesh

      # A collective call of all processes of the mesh, with models of the same values.
      #
      # @param mod [Torch::NN::Module] the model, whole; move it to its device before
      # @param mesh [DeviceMesh] whose dimensions have names
      # @param loss_fn [#call, nil] gets the model's output and the target, and returns their loss, a mean over the rows; for {#step}
      # @param plan [Hash{String => Object}, nil] how layers are divided along "tp": see {Tensor::Parallel.parallelize_module}
      # @param stages [Array<Array<String>>, nil] for each stage the names of its modules, in the order in which they run, each on
      #   the output of the one before; every parameter is in one of them. Stage s is at place s mod P of the P processes along
      #   "pp". nil: the model runs by its own forward; "pp" has one process then
      # @param schedule [Symbol, String] of the pipeline: :gpipe, :"1f1b", :interleaved_zero_bubble, or, with several stages for each process,
      #   :interleaved_1f1b
      # @param microbatches [Integer, nil] into how many parts rows are split; nil: four for each process along "pp", and one without
      # @param shard [Symbol, String, nil] of {FSDP::ShardingStrategy}, along "dp" or "dp_shard"; nil, :no_shard: replicas, by
      #   {Torch::NN::Parallel::DistributedDataParallel}
      # @param mixed_precision [Symbol, String, nil] the dtype in which layers are computed; parameters and the sums of gradients keep
      #   their own
      # @param checkpoint_ratio [Numeric] the share of layers whose activations are computed again in backward
      # @raise [ArgumentError, TypeError] naming the argument that is wrong, on all processes; before anything is sent
      def initialize(mod, mesh:, loss_fn: nil, plan: nil, stages: nil, schedule: :"1f1b", microbatches: nil, shard: nil,
        mixed_precision: nil, checkpoint_ratio: 0)
        super()
        raise TypeError, "mod: expected a Torch::NN::Module, got #{mod.inspect}" unless mod.is_a?(Torch::NN::Module)

        @mesh = mesh
        @dims = Dimensions.new(mesh, shard)
        Pipeline.check(schedule, microbatches)
        unless checkpoint_ratio.is_a?(Numeric) && checkpoint_ratio.between?(0, 1)
          raise ArgumentError, "checkpoint_ratio: expected a number from 0 to 1, got #{checkpoint_ratio.inspect}"
        end

        wrap = Wrapping.new(@dims, shard, mixed_precision)
        stages = Stages.new(mod, stages, @dims.pp)
        check_ties(stages, wrap)
        @module = mod
        Tensor::Parallel.parallelize_module(mod, @dims.tp_mesh, plan) if plan && @dims.tp_mesh
        Torch::Utils::Checkpoint::SelectiveCheckpointing.new(mod, ratio: checkpoint_ratio) if checkpoint_ratio.positive?
        chains = stages.keep(@dims.pp_rank)
        # The lowest stage that has a parameter counts it.
        @uncounted = stages.ties.flat_map { |tie| tie.sort.drop(1) }.filter_map { |_, name| mod.named_parameters[name] }
        ties = stages.ties.map { |tie| tie.transform_values { |name| wrap.name_of(name) } }
        @pipeline = Pipeline.new(chains.map { |chain| wrap.call(chain) }, @dims, schedule, microbatches, loss_fn, ties)
      end

      # Forward and backward over all of the rows; gradients are the mean over all data. A collective call.
      #
      # @param inputs [Array<Torch::Tensor>] of this process's part of the data
      # @param target [Object] what `loss_fn` compares with
      # @return [Float] the loss, the mean over the data of all processes
      def step(*inputs, target:)
        @dims.mean(@pipeline.step(inputs, target))
      end

      # The model's output, without a graph. A collective call.
      #
      # @param inputs [Array<Torch::Tensor>]
      # @return [Torch::Tensor] on all processes of the pipeline
      def forward(*inputs)
        @pipeline.output(inputs)
      end

      # Scales the gradients so that the norm of all of them, those of all processes, is at most `max_norm`. A collective call.
      #
      # @param max_norm [Numeric]
      # @param norm_type [Numeric] the norm's order; Float::INFINITY for the largest absolute value
      # @param error_if_nonfinite [Boolean] whether a norm that is infinite or not a number is an error, on all ranks
      # @return [Torch::Tensor] the norm before
      def clip_grad_norm_(max_norm, norm_type: 2.0, error_if_nonfinite: false)
        Torch::NN::Utils.clip_grad_norm_(parameters.uniq(&:object_id), max_norm, norm_type: norm_type,
          error_if_nonfinite: error_if_nonfinite, process_group: @dims.pp_group, uncounted: @uncounted)
      end
      alias_method :clip_grad_norm!, :clip_grad_norm_

      # The state_dict of the plain model, gathered from all processes. A collective call.
      #
      # @see FullStateDict#full_state_dict
      # @param rank0_only [Boolean] whether only rank 0 keeps it; the others get an empty Hash
      # @return [Hash{String => Torch::Tensor}] copies on the CPU
      def full_state_dict(rank0_only: false)
        Distributed.full_state_dict(@module, rank0_only: rank0_only, process_group: @dims.pp_group)
      end

      # @return [Integer] how many parts the data has
      def data_size
        @dims.data_size
      end

      # @return [Integer] which of them is this process's
      def data_rank
        @dims.data_rank
      end

      # @return [String] one line: the dimensions
      def description
        @dims.to_s
      end

      # @see Torch::NN::Module
      def train(mode = true)
        @pipeline.train(mode)
        super
      end

      private

      # Their pieces would begin elsewhere in each stage.
      def check_ties(stages, wrap)
        tie = stages.ties.first or return
        return unless wrap.shards? && @dims.pp > 1

        raise ArgumentError, "shard: #{tie.sort.map(&:last).join(" and ")} are one parameter, in different stages: expected no_shard, or all of its " \
          "modules in one stage"
      end
    end
  end
end

require_relative "parallel/dimensions"
require_relative "parallel/pipeline"
require_relative "parallel/stages"
require_relative "parallel/wrapping"
