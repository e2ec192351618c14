# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # An optimizer's state by parameter names rather than numbers; ranks may know different parameters of it.
      #
      # @api private
      NamedState = Struct.new(:state)

      # The state of a model of which this rank has some of the names, and other ranks the rest.
      #
      # @api private
      PartialState = Struct.new(:state)

      # A state of a model or an optimizer that is the same on all ranks.
      #
      # @api private
      WholeState = Struct.new(:state)

      # An optimizer's state, as far as this rank keeps it, by the names of parameters: of an optimizer whose parameters are
      # pieces of a sharded model, of a {Optim::ZeroRedundancyOptimizer}, or of one that keeps everything on each rank.
      #
      # @api private
      class OptimizerParts
        # A parameter with all its names, and what the optimizer that steps has of it: `local`, the elements of these regions; nil where
        # it has nothing.
        Slot = Struct.new(:names, :local, :shape, :regions, :divided) do
          # @return [String]
          def name
            names.first
          end

          # @return [Boolean] whether this rank says what its state is
          def known?
            local && (LocalPiece.numel(local).positive? || shape.inject(1, :*).zero?)
          end
        end

        # What of a saved state goes into this rank's part, what keeps it from going there, and the names that other ranks must have.
        Fetched = Struct.new(:state_dict, :faults, :elsewhere)

        # @return [Array<Array<Slot>>] by parameter group
        attr_reader :groups

        # @param names [Hash{Torch::NN::Parameter => Array<String>}] compared by identity
        # @param places [Hash{Torch::NN::Parameter => Place}] of those that ranks divide
        # @param partial [Boolean] whether other ranks have other parameters
        def initialize(optimizer, names, places, partial)
          @optimizer = optimizer
          @partial = partial
          @zero = optimizer.is_a?(Optim::ZeroRedundancyOptimizer)
          @stepping = @zero ? optimizer.optim : optimizer
          own = @zero ? optimizer.own_pieces.to_h { |piece| [piece.param, piece] }.compare_by_identity : {}
          slots = {}.compare_by_identity
          @groups = optimizer.param_groups.map do |group|
            group[:params].map { |param| slots[param] ||= slot_of(names[param], param, own[param], places[param]) }
          end
          @by_local = slots.values.select(&:local).to_h { |slot| [slot.local, slot] }.compare_by_identity
        end

        # @return [NamedState]
        def state
          state = slots.select(&:known?).to_h { |slot| [slot.name, state_of(slot)] }.reject { |_, kept| kept.empty? }
          groups = @optimizer.param_groups.zip(@groups).map do |group, slots|
            group.except(:params).transform_keys(&:to_s).merge("params" => slots.map(&:name))
          end
          NamedState.new({"state" => state, "param_groups" => groups})
        end

        # Reads what of a state goes into this rank's part.
        #
        # @param saved [Object] the state, by names or by numbers, with tensors or {Stored} ones
        # @return [Fetched]
        def fetch(saved)
          return Fetched.new(nil, ["expected an optimizer's state, got #{States.described(saved)}"]) unless state?(saved)

          saved = OptimizerParts.with_names(saved) if @partial
          keys, faults, elsewhere = OptimizerParts.by_names?(saved) ? keys_by_name(saved) : keys_by_number(saved)
          return Fetched.new(nil, faults) unless faults.empty?

          places = {}.compare_by_identity
          locals = @stepping.param_groups.map { |group| group[:params].map { |param| places[param] ||= places.size } }
          state = places.to_h do |param, place|
            slot = @by_local.fetch(param)
            [place, (saved["state"][keys[slot]] || {}).compact.to_h { |key, value| [key, part_of(slot, key, value, faults)] }]
          end
          groups = saved["param_groups"].zip(locals).map { |group, numbers| group.except("param_names").merge("params" => numbers) }
          Fetched.new({"state" => state.reject { |_, kept| kept.empty? }, "param_groups" => groups}, faults, elsewhere || [])
        end

        # Raises what keeps the state from being loaded; nothing is changed yet.
        #
        # @param fetched [Fetched]
        def check(fetched)
          unless fetched.faults.empty?
            raise ArgumentError, "what was saved does not fit this #{@optimizer.class.name}: #{fetched.faults.first(6).join("; ")}"
          end

          @stepping.send(:checked_state_dict, fetched.state_dict) if @stepping.respond_to?(:checked_state_dict, true)
        end

        # @param fetched [Fetched]
        def load(fetched)
          @zero ? @optimizer.load_local_state_dict(fetched.state_dict) : @optimizer.load_state_dict(fetched.state_dict)
        end

        # Whether a state names its parameters, rather than to number them.
        def self.by_names?(saved)
          saved.is_a?(Hash) && saved["param_groups"].is_a?(Array) && saved["param_groups"].any? do |group|
            group.is_a?(Hash) && group["params"].is_a?(Array) && group["params"].any?(String)
          end
        end

        # A state by numbers with the names beside them, as one by names.
        def self.with_names(saved)
          groups = saved["param_groups"]
          return saved if by_names?(saved) || !groups.all? { |group| group["param_names"].is_a?(Array) }

          names = groups.flat_map { |group| group["params"].zip(group["param_names"]) }.to_h
          {"state" => saved["state"].transform_keys { |number| names[number] },
           "param_groups" => groups.map { |group| group.merge("params" => group["param_names"]) }}
        end

        private

        def slots
          @groups.flatten.uniq(&:object_id)
        end

        def slot_of(names, param, own, place)
          divided = @zero || @partial || !place.nil?
          place ||= Place.new(LocalPiece.shape(param), nil, 0)
          return Slot.new(names, own&.local, place.shape, own && place.regions(own.start, own.length), true) if @zero

          Slot.new(names, param, place.shape, place.regions(0, LocalPiece.numel(param)), divided)
        end

        def state_of(slot)
          kept = @stepping.instance_variable_get(:@state)
          return {} unless kept.key?(slot.local)

          kept[slot.local].to_h { |key, value| [key.to_s, (slot.divided && value.is_a?(Torch::Tensor)) ? piece_of(slot, key, value) : value] }
        end

        # A value for each element of the piece, or one of the parameter as a whole.
        def piece_of(slot, key, value)
          return Piece.new(value, slot.shape, slot.regions) if value.shape == LocalPiece.shape(slot.local)
          return Piece.whole(value) if value.dim.zero?

          raise ArgumentError, "the optimizer's #{key} of #{slot.name}: expected a value for each of #{LocalPiece.numel(slot.local)} elements, or one " \
            "value, got shape #{value.shape}"
        end

        def state?(saved)
          saved.is_a?(Hash) && saved["state"].is_a?(Hash) && saved["param_groups"].is_a?(Array) && saved["param_groups"].all? do |group|
            group.is_a?(Hash) && group["params"].is_a?(Array)
          end
        end

        # @return [Array(Hash, Array<String>, Array<String>)] the key in the saved state for each slot, what does not fit, and what other
        #   ranks must have
        def keys_by_name(saved)
          given = saved["param_groups"].map { |group| group["params"].uniq }
          faults = count_faults(given)
          return [{}, faults] unless faults.empty?

          elsewhere = []
          given.zip(@groups).each_with_index do |(names, slots), i|
            missing = slots.reject { |slot| slot.names.intersect?(names) }.map(&:name).uniq
            others = names - slots.flat_map(&:names)
            faults.concat(States.listed("missing in group #{i}", missing))
            @partial ? elsewhere.concat(others) : faults.concat(States.listed("not known in group #{i}", others))
          end
          [slots.to_h { |slot| [slot, slot.names.find { |name| saved["state"].key?(name) }] }.compare_by_identity, faults, elsewhere]
        end

        def keys_by_number(saved)
          given = saved["param_groups"].map { |group| group["params"].uniq }
          faults = count_faults(given)
          faults << "it was saved by numbers without names, and ranks have different parameters of it" if @partial
          return [{}, faults] unless faults.empty?

          keys = {}.compare_by_identity
          given.zip(@groups.map { |slots| slots.uniq(&:object_id) }).each_with_index do |(numbers, slots), i|
            faults << "group #{i} has #{slots.size} parameters, saved were #{numbers.size}" unless numbers.size == slots.size
            slots.zip(numbers) { |slot, number| keys[slot] ||= number }
          end
          [keys, faults]
        end

        def count_faults(given)
          (given.size == @groups.size) ? [] : ["it has #{@groups.size} parameter groups, saved were #{given.size}"]
        end

        def part_of(slot, key, value, faults)
          return value unless value.is_a?(Torch::Tensor) || value.is_a?(Stored)

          if value.shape == slot.shape
            Stored.slice(value, slot.regions).values.reshape(LocalPiece.shape(slot.local))
          elsif value.shape.empty?
            value.is_a?(Stored) ? value.whole : value
          else
            faults << "#{key} of #{slot.name} has the shape #{value.shape}, expected #{slot.shape}"
            nil
          end
        end
      end
    end
  end
end
