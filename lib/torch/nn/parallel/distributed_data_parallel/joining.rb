# frozen_string_literal: true

require "torch/distributed/algorithms/join"

module Torch
  module NN
    module Parallel
      class DistributedDataParallel < Module
        # Uneven inputs: what a rank does while it has inputs left, and what it does afterwards.
        #
        # In each forward the ranks first count who has inputs left, then exchange what this forward does: whose
        # buffers are sent, whether buckets may be rebuilt, whether gradients will be averaged.
        #
        # @api private
        module Joining
          # What one forward does; `root` is the rank whose buffers are sent, -1 if none are. `stale` is a rank whose parameters
          # are not those that were tied, -1 if there is none; `tie` is whether that is so on all ranks.
          Plan = Struct.new(:root, :prepare, :sync, :stale, :tie)
          private_constant :Plan

          # What a rank without inputs does while the others train.
          class Hook < Torch::Distributed::Algorithms::JoinHook
            # @param model [DistributedDataParallel]
            def initialize(model)
              super()
              @model = model
            end

            def main_hook
              @model.send(:shadow)
            end

            def post_hook(is_last_joiner)
              @model.send(:sync_final_model, is_last_joiner)
            end
          end
          private_constant :Hook

          # @return [Torch::Distributed::Algorithms::JoinHook]
          # @param divide_by_initial_world_size [Boolean] see {DistributedDataParallel#join}
          def join_hook(divide_by_initial_world_size: true, **)
            if !divide_by_initial_world_size && @comm_hook
              raise ArgumentError, "divide_by_initial_world_size: expected true, for the communication hook #{@comm_hook.name} divides by " \
                "the number of all ranks"
            end

            @divide_by_active = !divide_by_initial_world_size
            Hook.new(self)
          end

          def join_process_group
            @process_group
          end

          def join_device
            @device
          end

          private

          def wants_sync
            Torch.grad_enabled? && @sync_gradients
          end

          # Before each forward within `join`.
          def prepare_joined
            Torch::Distributed::Algorithms::Join.notify_join_context(self)
            training = Torch.grad_enabled?
            Torch::Distributed::StepMemory.instance.step if training
            own = Plan.new(buffers_due? ? @process_group.rank : -1, training, wants_sync)
            follow(agree(own))
            @sync_next_forward = @sync_gradients if training
          end

          # In place of a forward and its backward.
          def shadow
            plan = agree(Plan.new(-1, false, false))
            follow(plan)
            @sync_next_forward = plan.sync if plan.prepare
            plan.sync ? @core.shadow : @core.arm(false)
          end

          def agree(plan)
            stale = stale?
            own = [plan.root, plan.prepare ? 1 : 0, plan.sync ? 1 : 0, stale ? @process_group.rank : -1, stale ? 0 : 1]
            exchanged = Torch::Distributed.send(:group_tensor, @process_group, own, :int64)
            root, prepare, sync, stale, fresh = Torch::Distributed.all_reduce(exchanged, op: :max, group: @process_group).to_a
            Plan.new(root, prepare == 1, sync == 1, stale, fresh.zero?)
          end

          def follow(plan)
            if plan.prepare
              tie_joined(plan)
              @core.divisor = join_config.active if @divide_by_active
              @core.prepare(plan.sync)
            end
            @core.sync_buffers(plan.root) unless plan.root.negative?
          end

          # One that has no inputs left runs nothing of the program that could thaw its parameters as the others did.
          def tie_joined(plan)
            return if plan.stale.negative?
            return tie(false) if plan.tie

            raise ArgumentError, "parameters of the model were frozen, thawed or replaced on rank #{plan.stale}, and not on all ranks, within join: " \
              "do it before or after join, on all ranks"
          end

          # Those who had inputs longest have the model that all go on with.
          def sync_final_model(last)
            @core.divisor = @process_group.size if @divide_by_active
            exchanged = Torch::Distributed.send(:group_tensor, @process_group, [last ? @process_group.rank : -1], :int64)
            root = Torch::Distributed.all_reduce(exchanged, op: :max, group: @process_group).to_a.first
            broadcast_all(@parameters_of_model.state, root)
          end

          def broadcast_all(tensors, root)
            return if tensors.empty?

            Torch::Distributed.coalescing_manager(group: @process_group) do
              tensors.each { |tensor| Torch::Distributed.broadcast(tensor.detach, group_src: root, group: @process_group) }
            end
          end
        end
        private_constant :Joining
      end
    end
  end
end
