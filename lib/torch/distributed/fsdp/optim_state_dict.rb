# frozen_string_literal: true

module Torch
  module Distributed
    module FSDP
      class << self
        # The state of a sharded model's optimizer as a plain optimizer has it: with whole tensors, and parameters by number. Gathered
        # one tensor at a time. A collective call of the processes that share the model.
        #
        #   state = FSDP.full_optim_state_dict(model, optimizer)
        #   Torch.save(state, "optimizer.pt") if Torch::Distributed.get_rank.zero?
        #
        # @param mod [Torch::NN::Module] the model
        # @param optimizer [Torch::Optim::Optimizer] over its parameters
        # @param rank0_only [Boolean] whether only rank 0 gets it; the others get an empty Hash
        # @return [Hash] what `state_dict` would be of the optimizer of a model that is not sharded; copies on the CPU
        # @raise [ArgumentError] if a parameter of the optimizer is none of the model, or its state is of an unknown form; the latter on all
        # @raise [MismatchError] on all, if the processes have made different steps
        def full_optim_state_dict(mod, optimizer, rank0_only: true)
          parts = parts_of(mod, optimizer)
          OptimizerGather.new(mod, parts, rank0_only).state_dict
        end

        # Loads what {.full_optim_state_dict} or a plain optimizer's `state_dict` gave. Each process takes its pieces; everything is checked
        # before anything is changed.
        #
        # @param mod [Torch::NN::Module] the model
        # @param optimizer [Torch::Optim::Optimizer] over its parameters
        # @param state [Hash] the same on all processes
        # @return [void]
        # @raise [ArgumentError] if it does not go with these parameters
        def load_full_optim_state_dict(mod, optimizer, state)
          parts = parts_of(mod, optimizer)
          fetched = parts.fetch(state)
          parts.check(fetched)
          parts.load(fetched)
          nil
        end

        private

        def parts_of(mod, optimizer)
          units_of(mod)
          unless optimizer.is_a?(Torch::Optim::Optimizer)
            raise TypeError, "optimizer: expected a Torch::Optim::Optimizer, got #{optimizer.inspect[0, 80]} (#{optimizer.class})"
          end
          if optimizer.is_a?(Optim::ZeroRedundancyOptimizer) || optimizer.is_a?(Optim::PostLocalSGDOptimizer)
            raise ArgumentError, "optimizer: expected one over the pieces of the model, got a #{optimizer.class.name}"
          end

          parts = Checkpoint::Parts.new({"model" => mod})
          return parts.optimizer(optimizer) if parts.named?(optimizer)

          raise ArgumentError, "optimizer: expected the parameters of this #{mod.class.name}, got one with others"
        end
      end

      # Gathers an optimizer's state from the pieces that processes have.
      #
      # @api private
      class OptimizerGather
        # @param parts [Checkpoint::OptimizerParts]
        def initialize(mod, parts, rank0_only)
          @parts = parts
          @rank0_only = rank0_only
          @units = FSDP.units_in(mod)
          @group_of = {}.compare_by_identity
          @units.each { |unit| unit.parameters.each { |parameter| @group_of[parameter] = unit.group } }
        end

        # @return [Hash]
        def state_dict
          own, error = own_state
          known = descriptions(own, error)
          numbers = {}
          state = @parts.groups.flatten.uniq(&:object_id).each_with_object({}) do |slot, all|
            numbers[slot.name] = number = numbers.size
            kept = state_of(slot, own["state"][slot.name] || {}, known)
            all[number] = kept unless kept.empty?
          end
          return {} unless here?

          groups = own["param_groups"].map { |group| group.merge("params" => group["params"].map { |name| numbers.fetch(name) }) }
          {"state" => state, "param_groups" => groups}
        end

        private

        def here?
          !@rank0_only || Distributed.get_rank.zero?
        end

        def own_state
          [@parts.state.state, nil]
        rescue ArgumentError => e
          [nil, "#{e.message} (global rank #{Distributed.get_rank})"]
        end

        # What each process of a group has of the states, so that all raise if something does not fit.
        #
        # @return [Hash{ProcessGroup => Array<Hash>}] by rank in the group
        def descriptions(own, error)
          mine = error || own["state"].transform_values { |kept| kept.transform_values { |value| description_of(value) } }
          known = @units.map(&:group).compact.uniq(&:object_id).to_h { |group| [group, Distributed.all_gather_object(mine, group: group)] }
          failure = known.values.flatten.grep(String).first || error
          raise ArgumentError, "full_optim_state_dict: #{failure}" if failure

          known.compare_by_identity
        end

        # What is the same on all is compared; a piece's place is not.
        def description_of(value)
          case value
          when Checkpoint::Piece then [[:piece, value.tensor.dtype, value.shape], value.start, value.count]
          when Torch::Tensor then [[:tensor, value.dtype, value.shape]]
          else [[:value, value]]
          end
        end

        # @return [Hash{String => Object}] whole, where it is wanted
        def state_of(slot, kept, known)
          group = @group_of[slot.local]
          return kept.transform_values { |value| whole(value) } unless group

          rows = known.fetch(group).map { |states| states[slot.name] }
          common(slot, group, rows).to_h do |key, (kind, value, shape)|
            next [key, value] if kind == :value

            [key, gather(group, slot.local.device, kept[key], value, shape, rows.map { |row| row && row[key].drop(1) })]
          end
        end

        def whole(value)
          case value
          when Checkpoint::Piece then value.tensor.detach.to("cpu").clone.reshape(value.shape)
          when Torch::Tensor then value.detach.to("cpu").clone
          else value
          end
        end

        # @param rows [Array<Hash, nil>] by rank what it has of the parameter's state; nil: nothing
        # @return [Hash{String => Array}]
        def common(slot, group, rows)
          known = rows.each_with_index.filter_map { |row, rank| [rank, row.transform_values(&:first)] if row }
          return {} if known.empty?

          first, row = known.first
          other, differing = known.find { |_, each| each != row }
          return row unless other

          one, two = [[row, differing], [differing, row]].map do |each, against|
            each.reject { |key, value| against[key] == value }.map { |key, (_, what)| "#{key}: #{what}" }
          end
          raise MismatchError, "full_optim_state_dict: the state of #{slot.name.delete_prefix("model.")} has #{one.join(", ")} on global rank " \
            "#{group.ranks[first]}, but #{two.join(", ")} on global rank #{group.ranks[other]}: expected the same steps on all"
        end

        # @param places [Array<Array(Integer, Integer), nil>] by rank first element and number of elements
        # @return [Torch::Tensor, nil] nil where it is not wanted
        def gather(group, device, piece, dtype, shape, places)
          return if @rank0_only && !group.ranks.include?(0)

          # One value, which each of them has.
          places = places.each_with_index.map { |place, rank| (rank == places.index { |each| each }) ? place : nil } if shape.empty?
          total = shape.inject(1, :*)
          device = Distributed._device_name(device)
          full = Torch.empty([here? ? total : 0], device: device).to(device, dtype: dtype)
          mine = places[group.rank] ? piece.tensor.detach.reshape(-1) : full.narrow(0, 0, 0)
          views = places.map { |start, count| full.narrow(0, start || 0, count || 0) } if here?
          @rank0_only ? Distributed.gather(mine, views, dst: 0, group: group) : Distributed.all_gather(views, mine, group: group)
          full.reshape(shape).to("cpu") if here?
        end
      end
      private_constant :OptimizerGather
    end
  end
end
