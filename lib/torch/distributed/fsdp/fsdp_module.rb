# frozen_string_literal: true

module Torch
  module Distributed
    module FSDP
      # What a module can do that {FSDP.fully_shard} has made a unit.
      module FSDPModule
        # Whether the gradients of backwards that follow are reduced. Off, they are kept whole and added up, which saves
        # communication and costs memory; the next backward with it on reduces the sums.
        #
        # @param sync [Boolean]
        # @return [void]
        def set_requires_gradient_sync(sync)
          unit.state.sync = sync
        end

        # Whether the unit is freed between forward and backward. The same on all processes.
        #
        # @param reshard [Boolean]
        # @return [void]
        def set_reshard_after_forward(reshard)
          unit.reshard_after_forward = reshard
        end

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
