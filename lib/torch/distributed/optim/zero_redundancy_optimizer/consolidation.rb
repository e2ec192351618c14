# frozen_string_literal: true

module Torch
  module Distributed
    module Optim
      class ZeroRedundancyOptimizer < Torch::Optim::Optimizer
        # Gathers the divided state on one rank.
        module Consolidation
          # Gathers the state of all parameters on one rank, where {ZeroRedundancyOptimizer#state_dict} returns it until the next step. A
          # collective call. Tensors are gathered one at a time, to where they belong; other ranks need no memory for it.
          #
          #   optimizer.consolidate_state_dict
          #   optimizer.state_dict if Torch::Distributed.get_rank.zero?
          #
          # @param to [Integer] the rank within the group that gets it
          # @return [nil]
          # @raise [ArgumentError] if `to` is no rank of the group
          # @raise [MismatchError] on all ranks, if they have made different steps on parts of a parameter
          def consolidate_state_dict(to: 0)
            Distributed.send(:check_group_rank, @process_group, "to", to)
            forget_consolidated
            described = exchange_descriptions
            state = {}.compare_by_identity
            @partitions.flatten.each do |partition|
              partition.params.each do |param|
                pieces = partition.pieces_of(param)
                kept = common_description(param, pieces, described).to_h do |key, (kind, *what)|
                  [key, (kind == :tensor) ? gather_state(key, *what, param, pieces, to) : what.first]
                end
                state[param] = kept unless kept.empty?
              end
            end
            @consolidated_on = to
            @state = state if to == @process_group.rank
            nil
          end

          # @api private
          # @return [Boolean] whether {ZeroRedundancyOptimizer#state_dict} returns the state on this rank
          def consolidated?
            @consolidated_on == @process_group.rank
          end

          private

          def forget_consolidated
            @consolidated_on = nil
            @state = {}.compare_by_identity
          end

          def check_consolidated
            return if consolidated?

            rank = @process_group.rank
            raise Error, "state_dict: the state is divided between #{@process_group.size} ranks, " + (@consolidated_on ?
              "and was gathered on rank #{@consolidated_on} of the group, not on rank #{rank}: call state_dict there, or " \
                "consolidate_state_dict(to: #{rank}) on all ranks" :
              "and was not gathered since the last step: call consolidate_state_dict on all ranks first, and then state_dict on the " \
                "rank that it names")
          end

          # @return [Hash] what the local optimizer keeps of a piece
          def state_of(piece)
            kept = @optim.instance_variable_get(:@state)
            kept.key?(piece.local) ? kept[piece.local] : {}
          end

          # Every rank learns what the others keep, so that all raise if something does not fit.
          #
          # @return [Hash{Partition::Piece => Hash}] for each key of the state `[:tensor, dtype, whether it has a value for each element]`,
          #   or `[:value, value]`
          def exchange_descriptions
            mine = begin
              own = @partitions.flatten.flat_map(&:own).map { |piece| description_of(piece) }
              Marshal.dump(own)
              own
            rescue TypeError, ArgumentError => e
              "the state on global rank #{@process_group.ranks[@process_group.rank]} cannot be gathered: #{e.message}"
            end
            all = Distributed.all_gather_object(mine, group: @process_group)
            failure = all.grep(String).first
            raise ArgumentError, "consolidate_state_dict: #{failure}" if failure

            all.each_with_index.with_object({}.compare_by_identity) do |(list, rank), described|
              @partitions.flatten.flat_map { |partition| partition.pieces[rank] }.zip(list) { |piece, each| described[piece] = each }
            end
          end

          def description_of(piece)
            state_of(piece).to_h do |key, value|
              next [key, [:value, value]] unless value.is_a?(Torch::Tensor)

              elements = value.shape == piece.local.shape
              unless elements || value.dim.zero?
                raise ArgumentError, "expected #{key} with a value for each of #{piece.length} elements, or with one value, got shape #{value.shape}"
              end
              [key, [:tensor, value.dtype, elements]]
            end
          end

          def common_description(param, pieces, described)
            first, *others = pieces.map { |rank, piece| [rank, described[piece]] }
            other = others.find { |_, description| description != first[1] } or return first[1]

            one, two = [first, other].map do |rank, description|
              listed = description.map { |key, (_, what)| "#{key}: #{what}" }
              "global rank #{@process_group.ranks[rank]} has #{listed.empty? ? "none" : listed.join(", ")}"
            end
            raise MismatchError, "consolidate_state_dict: expected the same kind of state of parameter #{places_of_parameters[param]} on all " \
              "ranks, but #{one}, #{two}: gradients must be the same on all ranks, as they are after DistributedDataParallel's backward"
          end

          # @return [Torch::Tensor, nil] in host memory; nil on other ranks than `to`
          def gather_state(key, dtype, elements, param, pieces, to)
            pieces = pieces.first(1) unless elements
            if to == @process_group.rank
              full = Torch.empty([elements ? param.numel : 1], dtype: dtype, device: Distributed._device_name(param.device))
            end
            pieces.each do |rank, piece|
              length = elements ? piece.length : 1
              transfer(state_of(piece)[key], full&.narrow(0, elements ? piece.start : 0, length), rank, to) if length.positive?
            end
            full&.reshape(elements ? param.shape : [])&.cpu
          end

          def transfer(tensor, place, from, to)
            own = @process_group.rank
            if own == from && own == to
              place.copy!(tensor.reshape(-1))
            elsif own == from
              Distributed.send(tensor, group_dst: to, group: @process_group)
            elsif own == to
              Distributed.recv(place, group_src: from, group: @process_group)
            end
          end
        end
        private_constant :Consolidation
      end
    end
  end
end
