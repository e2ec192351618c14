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
          OptimizerGather.new(*parts_of(mod, optimizer), rank0_only).state_dict
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
          _, parts = parts_of(mod, optimizer)
          fetched = parts.fetch(state)
          parts.check(fetched)
          parts.load(fetched)
          nil
        end

        private

        def parts_of(mod, optimizer)
          parts = Checkpoint::Parts.new({"model" => mod})
          units_of(mod) unless parts.sharded?
          unless optimizer.is_a?(Torch::Optim::Optimizer)
            raise TypeError, "optimizer: expected a Torch::Optim::Optimizer, got #{optimizer.inspect[0, 80]} (#{optimizer.class})"
          end
          if optimizer.is_a?(Optim::ZeroRedundancyOptimizer) || optimizer.is_a?(Optim::PostLocalSGDOptimizer)
            raise ArgumentError, "optimizer: expected one over the pieces of the model, got a #{optimizer.class.name}"
          end

          if parts.partial?(mod)
            raise ArgumentError, "module: this #{mod.class} has a part of a model's names: expected a whole model; Checkpoint.save saves " \
              "it in parts"
          end
          return [parts, parts.optimizer(optimizer)] if parts.named?(optimizer)

          raise ArgumentError, "optimizer: expected the parameters of this #{mod.class.name}, got one with others"
        end
      end

      # Gathers an optimizer's state from the pieces that processes have.
      #
      # @api private
      class OptimizerGather
        # @param places [Checkpoint::Parts]
        # @param parts [Checkpoint::OptimizerParts]
        def initialize(places, parts, rank0_only)
          @parts = parts
          @rank0_only = rank0_only
          @slots = parts.groups.flatten.uniq(&:object_id)
          @places = @slots.to_h { |slot| [slot.name, places.place(slot.local)] }
        end

        # @return [Hash]
        def state_dict
          own, error = own_state
          known = descriptions(own, error)
          numbers = {}
          state = @slots.each_with_object({}) do |slot, all|
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
          mine = error || own["state"].to_h { |name, kept| [name, kept.transform_values { |value| description_of(value, @places[name]) }] }
          groups = @places.values.compact.flat_map { |place| [*place.group, *layout_of(place)&.group] }.uniq(&:object_id)
          known = groups.to_h { |group| [group, Distributed.all_gather_object(mine, group: group)] }
          failure = known.values.flatten.grep(String).first || error
          raise ArgumentError, "full_optim_state_dict: #{failure}" if failure

          known.compare_by_identity
        end

        # What is the same on all is compared; a piece's place is not.
        def description_of(value, place)
          case value
          when Checkpoint::Piece then [[:piece, value.tensor.dtype, value.shape], value.shape.empty? ? 0 : place.start, value.tensor.numel]
          when Torch::Tensor then [[:tensor, value.dtype, value.shape]]
          else [[:value, value]]
          end
        end

        # @return [Hash{String => Object}] whole, where it is wanted
        def state_of(slot, kept, known)
          place = @places[slot.name]
          layout = layout_of(place)
          common(slot, layout.group, known.fetch(layout.group).map { |states| states[slot.name] }) if layout
          return kept.transform_values { |value| whole(value, layout) } unless place&.group

          rows = known.fetch(place.group).map { |states| states[slot.name] }
          common(slot, place.group, rows).to_h do |key, (kind, value, shape)|
            next [key, value] if kind == :value

            [key, gather(place, slot.local.device, kept[key], value, shape, rows.map { |row| row && row[key].drop(1) })]
          end
        end

        def layout_of(place)
          place.layout if place&.layout&.divided?
        end

        def whole(value, layout = nil)
          case value
          when Checkpoint::Piece
            return layout.gather(value.tensor).to("cpu") if layout && !value.shape.empty?

            value.tensor.detach.to("cpu").clone.reshape(value.shape)
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
        def gather(place, device, piece, dtype, shape, places)
          group = place.group
          layout = layout_of(place) unless shape.empty?
          # What is divided further, all ranks have to put together.
          to_first = @rank0_only && !layout
          return if to_first && !group.ranks.include?(0)

          # One value, which each of them has.
          places = places.each_with_index.map { |each, rank| (rank == places.index { |known| known }) ? each : nil } if shape.empty?
          shape = layout.local_shape if layout
          filled = here? || !to_first
          device = Distributed._device_name(device)
          full = Torch.empty([filled ? shape.inject(1, :*) : 0], device: device).to(device, dtype: dtype)
          mine = places[group.rank] ? piece.tensor.detach.reshape(-1) : full.narrow(0, 0, 0)
          views = places.map { |start, count| full.narrow(0, start || 0, count || 0) } if filled
          to_first ? Distributed.gather(mine, views, dst: 0, group: group) : Distributed.all_gather(views, mine, group: group)
          full = layout.gather(full.view(*shape)) if layout
          full.reshape(layout ? layout.shape : shape).to("cpu") if here?
        end
      end
      private_constant :OptimizerGather
    end
  end
end
