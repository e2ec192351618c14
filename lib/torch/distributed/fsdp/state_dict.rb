# frozen_string_literal: true

module Torch
  module Distributed
    module FSDP
      class << self
        # The block sees whole parameters, all at once. A collective call.
        #
        #   FSDP.summon_full_params(model) { puts model.head.weight.shape.inspect }
        #
        # @param mod [Torch::NN::Module]
        # @param writeback [Boolean] whether what the block writes to them is kept; each process keeps its own pieces
        # @return [Object] the block's value
        def summon_full_params(mod, writeback: true, &block)
          units_of(mod).reduce(block) { |inner, unit| -> { unit.summon(writeback, &inner) } }.call
        end

        # {Distributed#full_state_dict} of a sharded model.
        #
        # @param mod [Torch::NN::Module]
        # @param rank0_only [Boolean] whether only rank 0 keeps them; the others get an empty Hash, and hold one unit and what waits to be collected
        # @return [Hash{String => Torch::Tensor}] copies on the CPU
        def full_state_dict(mod, rank0_only: false)
          units_of(mod)
          Distributed.full_state_dict(mod, rank0_only: rank0_only)
        end

        # {Distributed#load_full_state_dict} of a sharded model.
        #
        # @param mod [Torch::NN::Module]
        # @param state [Hash{String => Torch::Tensor}] the same on all processes
        # @return [void]
        # @raise [ArgumentError] naming the entries that are missing, unexpected, or of another shape
        def load_full_state_dict(mod, state)
          units_of(mod)
          Distributed.load_full_state_dict(mod, state)
        end

        # @api private
        def units_of(mod)
          units = units_in(mod)
          raise ArgumentError, "module: this #{mod.class} is not sharded: see fully_shard" if units.empty?

          units
        end

        # @api private
        # @return [Array<Unit>] none for a module that is not sharded
        def units_in(mod)
          mod.modules.to_a.filter_map { |each| Unit.of(each) }.uniq
        end
      end
    end
  end
end
