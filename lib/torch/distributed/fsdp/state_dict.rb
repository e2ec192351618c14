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

        # The model's state_dict with whole parameters, gathered unit by unit. A collective call.
        #
        # @param mod [Torch::NN::Module]
        # @param rank0_only [Boolean] whether only rank 0 keeps them; the others get an empty Hash, and never hold more than a unit
        # @return [Hash{String => Torch::Tensor}] copies on the CPU
        def full_state_dict(mod, rank0_only: false)
          full = {}.compare_by_identity
          mod = mod.module if mod.is_a?(FullyShardedDataParallel)
          units_of(mod).each do |unit|
            flat = unit.gather
            next if rank0_only && !Distributed.get_rank.zero?

            unit.each_piece do |_, parameter, offset, _, shape|
              full[parameter] = flat.narrow(0, offset, shape.inject(1, :*)).view(*shape).to("cpu").clone
            end
          end
          return {} if rank0_only && !Distributed.get_rank.zero?

          Torch.no_grad { mod.state_dict.to_h { |name, tensor| [name, full[parameter_named(mod, name)] || tensor.detach.to("cpu").clone] } }
        end

        # Loads what {.full_state_dict} or a plain model's `state_dict` gave. Each process takes its pieces.
        #
        # @param mod [Torch::NN::Module]
        # @param state [Hash{String => Torch::Tensor}] the same on all processes
        # @return [void]
        # @raise [ArgumentError] naming the entries that are missing, unexpected, or of another shape
        def load_full_state_dict(mod, state)
          mod = mod.module if mod.is_a?(FullyShardedDataParallel)
          own = mod.state_dict
          check_names(own.keys, state.keys)
          pieces = pieces_of(mod)
          own.each { |name, tensor| check_shape(name, state[name], pieces[parameter_named(mod, name)]&.last || tensor.shape) }
          Torch.no_grad do
            own.each do |name, tensor|
              parameter = parameter_named(mod, name)
              start, = pieces[parameter]
              from = state[name]
              next tensor.copy!(from) unless start

              parameter.copy!(from.reshape(-1).narrow(0, start, parameter.numel)) if parameter.numel.positive?
            end
          end
          nil
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

        private

        def parameter_named(mod, name)
          @names ||= ObjectSpace::WeakMap.new
          (@names[mod] ||= mod.named_parameters)[name]
        end

        def pieces_of(mod)
          pieces = {}.compare_by_identity
          units_of(mod).each { |unit| unit.each_piece { |_, parameter, _, start, shape| pieces[parameter] = [start, shape] } }
          pieces
        end

        def check_names(own, given)
          missing = own - given
          unexpected = given - own
          return if missing.empty? && unexpected.empty?

          raise ArgumentError, "state: missing #{missing.inspect}, unexpected #{unexpected.inspect}"
        end

        def check_shape(name, tensor, shape)
          raise ArgumentError, "state: #{name.inspect} has the shape #{tensor.shape}, expected #{shape}" unless tensor.shape == shape
        end
      end
    end
  end
end
