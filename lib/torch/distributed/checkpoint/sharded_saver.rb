# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # A save of what ranks divide: each writes pieces that it has, in one file, and the manifest says where the elements of
      # each tensor lie.
      #
      # @api private
      class ShardedSaver < Saver
        private

        # Ranks may know the states of different parameters: what all know together stands in the manifest.
        def pack(objects, extra, rng)
          tree = Tree.new
          packed = nil
          said = @together.all(@doing) do
            packed = {"objects" => objects.to_h { |name, state| [name, tree.pack(state, name)] }, "extra" => tree.pack(extra, "extra")}
            state = [Distributed._rng_state].pack("m0") if rng
            [state, Distribution.described(tree.entries.values, @buffers), tree.partial, tree.named]
          end
          merge_names(tree.partial, said.map { |each| each[2] })
          naming { merge_states(tree.named, said.map(&:last)) }
          packed["rng"] = rng ? packed_rng(tree, said.map(&:first)) : nil
          rows = Distribution.described(tree.entries.values.select { |entry| entry.name.start_with?("rng.") }, @buffers)
          @distribution = naming { Distribution.new(said.map { |each| each[1] + rows }) }
          [packed, tree.entries]
        end

        # @param partial [Hash{String => Hash}] this rank's packed states of models, which become those of all ranks
        # @param all [Array<Hash>] by rank
        def merge_names(partial, all)
          partial.each do |name, packed|
            packed.replace(all.filter_map { |states| states[name] }.inject { |known, more| known.merge(more) { |_, first| first } })
          end
        end

        # @param named [Hash{String => Hash}] the same of optimizers
        # @param all [Array<Hash>] by rank
        def merge_states(named, all)
          named.each do |name, packed|
            known = {}
            all.each_with_index do |states, rank|
              (states.dig(name, "state") || {}).each do |parameter, state|
                first, other = known[parameter] ||= [rank, state]
                raise MismatchError, differing(name, parameter, first, other, rank, state) unless other == state
              end
            end
            merge_groups(name, packed["param_groups"], all.filter_map { |states| states.dig(name, "param_groups") })
            order = packed["param_groups"].flat_map { |group| group["params"] }.uniq
            packed["state"] = order.filter_map { |parameter| [parameter, known[parameter].last] if known.key?(parameter) }.to_h
          end
        end

        # Their options are this rank's.
        def merge_groups(name, groups, all)
          rank = all.index { |each| each.size != groups.size }
          raise MismatchError, "#{name}: it has #{groups.size} parameter groups, but #{all[rank].size} on rank #{rank}" if rank

          groups.each_with_index { |group, i| group["params"] = all.flat_map { |each| each[i]["params"] }.uniq }
        end

        def differing(name, parameter, first, other, rank, state)
          one, two = [[first, other, state], [rank, state, other]].map do |each, own, its|
            "#{own.reject { |key, value| its[key] == value }.map { |key, value| "#{key}: #{value.inspect[0, 60]}" }.join(", ")} on rank #{each}"
          end
          "#{name}: the state of #{parameter} has #{one}, but #{two}: expected the same steps on all ranks"
        end

        def naming
          yield
        rescue MismatchError, ArgumentError => e
          raise (e.is_a?(MismatchError) ? MismatchError : CheckpointError), "#{@doing}: #{e.message}"
        end

        def plan(packed, entries)
          @packed = packed
          @entries = entries
          @mine = @distribution.part(@together.rank).map { |item| file_entry(item, entries.fetch(item.name)) }
          @mine = nil if @mine.empty? && @together.rank.positive?
        end

        # In the file each piece is a tensor of its own, and has the tensor's name and shape if it is all of it.
        def file_entry(item, entry)
          region = item.region
          return Tree::Entry.new(item.name, entry.tensor, entry.dtype, item.shape) if item.count == item.shape.inject(1, :*)

          name = "#{item.name}[#{region.start}...#{region.stop}#{", #{region.width} of #{region.stride}" if region.stride}]"
          at = entry.regions.take_while { |each| each != region }.sum(&:count)
          Tree::Entry.new(name, entry.tensor.detach.reshape(-1).narrow(0, at, item.count), entry.dtype, [item.count])
        end

        # Places in the order of what the rank was to write.
        def write_file
          said = DataFile.write(@data, @mine, block: BLOCK)
          said.merge("tensors" => @mine.map { |entry| said["tensors"].fetch(entry.name) })
        end

        def manifest(written)
          super.merge("block" => BLOCK)
        end

        def version
          @distribution.strided? ? Manifest::STRIDED : Manifest::DIVIDED
        end

        def tensors(written)
          places = {}.compare_by_identity
          written.each_with_index do |(file, said), rank|
            @distribution.part(rank).zip(said["tensors"]) { |item, place| places[item] = place.merge("file" => file) } if said
          end
          result = {}
          @distribution.each_tensor do |name, dtype, shape, items|
            pieces = items.reject { |item| item.count.zero? }.sort_by { |item| item.region&.start || 0 }
              .map { |item| (item.region || Region.new(0, item.count)).to_h.compact.transform_keys(&:to_s).merge(places.fetch(item)) }
            result[name] = {"dtype" => dtype, "shape" => shape, "pieces" => pieces}
          end
          result
        end
      end
    end
  end
end
