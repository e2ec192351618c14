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

        # Ranks have different pieces of the same tensors, so that all must know of all.
        def pack(objects, extra, rng)
          tree = Tree.new
          packed = nil
          said = @together.all(@doing) do
            packed = pack_all(tree, objects, extra)
            [packed["objects"], tree.kinds, Distribution.described(tree.entries.values, @buffers), rng ? [Distributed._rng_state].pack("m0") : nil]
          end
          merge(packed, said.map { |each| each.first(3) }, tree, said.map(&:last), rng)
        end

        def distribution(lists)
          Distribution.new(lists)
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
