# frozen_string_literal: true

module Torch
  module Distributed
    module FSDP
      # What a module can do that {FSDP.fully_shard} has made a unit.
      module FSDPModule
        # Whether the gradients of backwards that follow are reduced. Off, they are kept whole and added up, which saves
        # communication and costs memory; the next backward with it on reduces the sums, also of layers that it leaves out itself.
        # The same on all processes.
        #
        # @param sync [Boolean]
        # @param recurse [Boolean] whether also those of the units within this one
        # @return [void]
        def set_requires_gradient_sync(sync, recurse: true)
          (recurse ? FSDP.units_in(self) : [unit]).each { |each| each.sync = sync }
        end

        # Whether the unit is freed between forward and backward. The same on all processes.
        #
        # @param reshard [Boolean]
        # @return [void]
        def set_reshard_after_forward(reshard)
          unit.reshard_after_forward = reshard
        end

        # Scales the gradients so that the norm of all of them, of all ranks and units, is at most `max_norm`. A collective call. Parameters
        # that are in no unit are the same on all ranks, unless layouts divide them, and count once.
        #
        # @param max_norm [Numeric]
        # @param norm_type [Numeric] the norm's order; Float::INFINITY for the largest absolute value
        # @param error_if_nonfinite [Boolean] whether a norm that is infinite or not a number is an error, on all ranks
        # @param process_group [ProcessGroup, Array<ProcessGroup>, nil] whose processes have other parameters: the stages of a pipeline
        # @return [Torch::Tensor] the norm before
        # @see Torch::NN::Utils.clip_grad_norm_
        def clip_grad_norm_(max_norm, norm_type: 2.0, error_if_nonfinite: false, process_group: nil)
          Torch::NN::Utils.clip_grad_norm_(parameters, max_norm, norm_type: norm_type, error_if_nonfinite: error_if_nonfinite,
            process_group: process_group)
        end
        alias_method :clip_grad_norm!, :clip_grad_norm_

        # Gathers the unit until {#reshard}, outside of training. A collective call.
        #
        # @return [void]
        def unshard
          unit.unshard
        end

        # @return [void]
        def reshard
          unit.reshard
        end

        private

        def unit
          Unit.of(self)
        end
      end
    end
  end
end
