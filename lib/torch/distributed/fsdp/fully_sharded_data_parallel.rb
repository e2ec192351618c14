# frozen_string_literal: true

module Torch
  module Distributed
    module FSDP
      # How a model is distributed: PyTorch's names.
      module ShardingStrategy
        # Parameters, gradients and optimizer states are sharded; units are freed after forward.
        FULL_SHARD = :full_shard
        # The same, but units stay whole from forward to backward.
        SHARD_GRAD_OP = :shard_grad_op
        # Nothing is sharded: as DistributedDataParallel.
        NO_SHARD = :no_shard
        # FULL_SHARD within the second dimension of a mesh, replicas along the first.
        HYBRID_SHARD = :hybrid_shard
        # All of them.
        ALL = [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD].freeze
      end

      # A model that is fully sharded, as a module around it: {FSDP.fully_shard} for those who know PyTorch's first form.
      #
      #   policy = FSDP::WrapPolicies.module_wrap_policy(Block)
      #   model = FSDP::FullyShardedDataParallel.new(net, auto_wrap_policy: policy)
      #   optimizer = Torch::Optim::AdamW.new(model.parameters, lr: 1e-3)
      class FullyShardedDataParallel < Torch::NN::Module
        include Torch::NN::Parallel::Wrapper

        # @return [Torch::NN::Module] the model that was given
        attr_reader :module

        # A collective call of all processes of the group or mesh.
        #
        # @param mod [Torch::NN::Module] the model; move it to its device before
        # @param process_group [ProcessGroup, nil] nil: the default group
        # @param sharding_strategy [Symbol] one of {ShardingStrategy}
        # @param auto_wrap_policy [#call, nil] see {WrapPolicies}; nil: the model is one unit, and whole while it runs
        # @param mixed_precision [MixedPrecisionPolicy, nil]
        # @param cpu_offload [Boolean, nil] as with {CPUOffloadPolicy}
        # @param ignored_params [Enumerable<Torch::NN::Parameter>] that remain as they are
        # @param sync_module_states [Boolean] whether rank 0's parameters and buffers go to all before they are sharded
        # @param device_mesh [DeviceMesh, nil] instead of a group; two dimensions for HYBRID_SHARD
        # @param use_orig_params [Boolean] for PyTorch's sake: the parameters are the model's own in any case
        # @param limit_all_gathers [Boolean] for PyTorch's sake: at most one unit is gathered ahead in any case
        # @param forward_prefetch [Boolean] for PyTorch's sake: the next unit is gathered ahead in any case
        # @raise [ArgumentError, TypeError] naming the argument that is wrong; before anything is sent
        def initialize(mod, process_group: nil, sharding_strategy: :full_shard, auto_wrap_policy: nil, mixed_precision: nil,
          cpu_offload: nil, ignored_params: [], sync_module_states: false, device_mesh: nil, use_orig_params: true, limit_all_gathers: true,
          forward_prefetch: true)
          super()
          raise TypeError, "mod: expected a Torch::NN::Module, got #{mod.inspect}" unless mod.is_a?(Torch::NN::Module)

          @strategy = strategy(sharding_strategy)
          raise ArgumentError, "cpu_offload: expected true, false or nil, got #{cpu_offload.inspect}" unless [nil, true, false].include?(cpu_offload)
          unless auto_wrap_policy.nil? || auto_wrap_policy.respond_to?(:call)
            raise ArgumentError, "auto_wrap_policy: expected something to call, see WrapPolicies, got #{auto_wrap_policy.inspect}"
          end

          @groups = groups(process_group, device_mesh)
          broadcast(mod) if sync_module_states
          @options = {groups: @groups, reshard_after_forward: {full_shard: nil, hybrid_shard: nil}.fetch(@strategy, false),
                      offload_policy: cpu_offload ? CPUOffloadPolicy.new : OffloadPolicy.new,
                      mp_policy: mixed_precision || MixedPrecisionPolicy.new, ignored_params: ignored_params.to_a}
          wrap(mod, "", auto_wrap_policy) if auto_wrap_policy
          FSDP.shard(mod, name: mod.class.name, **@options)
          @module = mod
        end

        # Runs the model.
        def forward(*inputs, **kwargs)
          @module.call(*inputs, **kwargs)
        end

        # Backwards within the block keep whole gradients and add them up; the first one after it reduces the sums. What was
        # set before holds again after it, so that blocks may be nested.
        #
        # @return [Object] the block's value
        def no_sync
          before = FSDP.units_in(@module).to_h { |unit| [unit, unit.sync] }
          before.each_key { |unit| unit.sync = false }
          yield
        ensure
          before&.each { |unit, sync| unit.sync = sync }
        end

        # Scales the gradients so that the norm of all of them, of the whole model, is at most `max_norm`. A collective call.
        #
        # @param max_norm [Numeric]
        # @param norm_type [Numeric]
        # @return [Torch::Tensor] the norm before
        def clip_grad_norm_(max_norm, norm_type: 2.0)
          @module.clip_grad_norm_(max_norm, norm_type: norm_type)
        end
        alias_method :clip_grad_norm!, :clip_grad_norm_

        # @see FSDP.summon_full_params
        def summon_full_params(writeback: true, &block)
          FSDP.summon_full_params(@module, writeback: writeback, &block)
        end

        # @see FSDP.full_state_dict
        def full_state_dict(rank0_only: false)
          FSDP.full_state_dict(@module, rank0_only: rank0_only)
        end

        # @see FSDP.load_full_state_dict
        def load_full_state_dict(state)
          FSDP.load_full_state_dict(@module, state)
        end

        private

        def strategy(given)
          found = given.to_s.downcase.to_sym
          return found if ShardingStrategy::ALL.include?(found)

          raise ArgumentError, "sharding_strategy: expected one of #{ShardingStrategy::ALL.inspect}, got #{given.inspect}"
        end

        # Those of shards, and of replicas.
        def groups(group, mesh)
          raise ArgumentError, "process_group: expected nil beside a device_mesh" if group && mesh

          dims = mesh ? mesh.ndim : 1
          if (@strategy == :hybrid_shard) != (dims == 2)
            raise ArgumentError, "device_mesh: expected #{(@strategy == :hybrid_shard) ? "two dimensions, replicate and shard," : "one dimension"} " \
              "for #{@strategy.inspect}, got #{mesh ? dims : "none"}"
          end

          shards, replicas = mesh ? FSDP.groups_of(mesh) : [Distributed.send(:member_group, group, "FullyShardedDataParallel"), nil]
          (@strategy == :no_shard) ? [nil, shards] : [shards, replicas]
        end

        def broadcast(mod)
          @groups.compact.reverse_each do |group|
            (mod.parameters + mod.modules.to_a.flat_map { |each| each.named_buffers.values }).uniq(&:object_id).each do |tensor|
              next unless tensor.is_a?(Torch::Tensor)

              Distributed.broadcast(tensor.detach, src: group.ranks.first, group: group)
            end
          end
        end

        def wrap(mod, name, policy)
          mod.named_children.each do |child_name, child|
            path = name.empty? ? child_name.to_s : "#{name}.#{child_name}"
            wrap(child, path, policy)
            next if child.is_a?(Torch::NN::ModuleList) || child.is_a?(FSDPModule)

            FSDP.shard(child, name: path, **@options) if policy.call(child, path, left(child))
          end
        end

        # Elements of parameters that are in no unit.
        def left(mod)
          taken = mod.modules.to_a.filter_map { |each| Unit.of(each) }.uniq.flat_map(&:parameters)
          mod.parameters.uniq(&:object_id).reject { |each| taken.any? { |other| other.equal?(each) } }.sum(&:numel)
        end
      end
    end
  end
end
