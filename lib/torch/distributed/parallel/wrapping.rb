# frozen_string_literal: true

require_relative "../../utils/checkpoint/layers"

module Torch
  module Distributed
    class Parallel
      # Makes replicas or shards of a stage.
      #
      # @api private
      class Wrapping
        # @param dims [Dimensions]
        # @param shard [Symbol, String, nil]
        # @param dtype [Symbol, String, nil]
        # @raise [ArgumentError] if a dtype is given and there is no dimension of data
        def initialize(dims, shard, dtype)
          @mesh = dims.data_mesh
          @strategy = (shard || :no_shard).to_sym
          @dtype = dtype&.to_sym
          @needed = dims.data_size > 1 || @dtype
          raise ArgumentError, "mixed_precision: expected a mesh with dp, of one process or more, got #{dims}" if @dtype && @mesh.nil?
        end

        # @param stage [Torch::NN::Module]
        # @return [Torch::NN::Module] to be called in its place
        def call(stage)
          return stage unless @needed

          shards? ? shard(stage) : replicate(stage)
        end

        # @return [Boolean] whether each process has pieces of a stage's parameters
        def shards?
          @needed && @strategy != :no_shard
        end

        # @param name [String] of a parameter of a stage
        # @return [String] its name in what {#call} returns
        def name_of(name)
          (@needed && !shards?) ? "module.#{name}" : name
        end

        private

        def replicate(stage)
          precision = @dtype && Torch::NN::Parallel::MixedPrecision.new(param_dtype: @dtype)
          Torch::NN::Parallel::DistributedDataParallel.new(stage, process_group: @mesh.get_group, mixed_precision: precision)
        end

        def shard(stage)
          policy = FSDP::MixedPrecisionPolicy.new(param_dtype: @dtype, reduce_dtype: @dtype && :float32)
          options = {mesh: @mesh, mp_policy: policy, reshard_after_forward: ((@strategy == :shard_grad_op) ? false : nil)}
          parts(stage).each { |part| FSDP.fully_shard(part, **options) }
          FSDP.fully_shard(stage, **options)
        end

        # What becomes units of their own.
        def parts(stage)
          stage.is_a?(Chain) ? stage.parts : Torch::Utils::Checkpoint::Layers.of(stage).values
        end
      end
      private_constant :Wrapping
    end
  end
end
