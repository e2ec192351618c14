# frozen_string_literal: true

module Torch
  module Distributed
    # A model's state with whole tensors, however ranks divide it.
    module FullStateDict
      # The model's state_dict with whole parameters, of one that {FSDP} shards, that layouts divide, or both; gathered unit by unit. A
      # collective call of all processes that have a part.
      #
      # @param model [Torch::NN::Module]
      # @param rank0_only [Boolean] whether only rank 0 keeps them; the others get an empty Hash, and hold one unit and what waits to be collected
      # @param process_group [ProcessGroup, nil] whose processes have different names of the model, such as the stages of a pipeline: all
      #   get those of all. nil: the model has all
      # @return [Hash{String => Torch::Tensor}] copies on the CPU
      def full_state_dict(model, rank0_only: false, process_group: nil)
        model = Checkpoint::States.unwrapped(model)
        group = member_group(process_group, "full_state_dict") if process_group
        kept = !rank0_only || (group ? group.ranks.include?(0) : get_rank.zero?)
        full = {}.compare_by_identity
        Checkpoint::Gathering.each(model) do |gathered|
          gathered.each { |parameter, tensor| full[parameter] = tensor.to("cpu").clone if kept }
        end
        named = model.named_parameters
        own = kept ? model.state_dict.compact : {}
        state = own.to_h { |name, tensor| [name, full[named[name]] || tensor.detach.to("cpu").clone] }
        group ? all_names(state, rank0_only, group) : state
      end

      # Loads what {#full_state_dict} or a plain model's `state_dict` gave. Each process takes its part.
      #
      # @param model [Torch::NN::Module]
      # @param state [Hash{String => Torch::Tensor}] the same on all processes
      # @return [void]
      # @raise [ArgumentError] naming the entries that are missing, unexpected, or of another shape
      def load_full_state_dict(model, state)
        model = Checkpoint::States.unwrapped(model)
        parts = Checkpoint::Parts.new({"model" => model})
        own = parts.layout(model)
        missing = own.keys - state.keys
        unexpected = parts.partial?(model) ? [] : state.keys - own.keys
        unless missing.empty? && unexpected.empty?
          raise ArgumentError, "state: missing #{missing.inspect}, unexpected #{unexpected.inspect}"
        end

        own.each do |name, piece|
          next if state[name].shape == piece.shape

          raise ArgumentError, "state: #{name.inspect} has the shape #{state[name].shape}, expected #{piece.shape}"
        end
        Torch.no_grad { own.each { |name, piece| piece.fill(Checkpoint::Stored.taken(state[name], piece.regions)) } }
        nil
      end

      private

      # Each name's tensor comes from the first that has it.
      def all_names(state, rank0_only, group)
        rows = state.map { |name, tensor| [name, Checkpoint.dtype_name(tensor), tensor.shape] }
        said = all_gather_object(rows, group: group, serializer: :json)
        return {} if rank0_only && !group.ranks.include?(0)

        from = {}
        said.each_with_index { |list, rank| list.each { |name, dtype, shape| from[name] ||= [rank, dtype, shape] } }
        here = !rank0_only || get_rank.zero?
        whole = from.to_h do |name, (rank, dtype, shape)|
          tensor = state[name] || (Checkpoint.room(dtype, shape) if here)
          [name, rank0_only ? to_first(tensor, rank, group) : to_all(tensor, rank, group)]
        end
        here ? whole : {}
      end

      def to_all(tensor, rank, group)
        broadcast(tensor, src: group.ranks[rank], group: group)
        tensor
      end

      def to_first(tensor, rank, group)
        return tensor if group.ranks[rank].zero?

        send(tensor, dst: 0, group: group) if group.rank == rank
        recv(tensor, src: group.ranks[rank], group: group) if get_rank.zero?
        tensor
      end
    end
  end
end
