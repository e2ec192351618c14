# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # Which rank writes what of a checkpoint, computed alike on all ranks from what each of them has: a region goes to one of
      # the ranks that have it, and what all have to the rank that has least to write. What rank 0 is to say of is, where only some
      # ranks have it, said by the first of these.
      #
      # @api private
      class Distribution
        # What is written: all of a tensor (region nil), or a part of it.
        Item = Struct.new(:name, :dtype, :shape, :count, :region, :ranks) do
          def bytes
            DTYPES.fetch(dtype).bytes * count
          end
        end

        # @param entries [Array<Tree::Entry>]
        # @param first [Hash{Integer => true}] the object_ids of tensors that rank 0 writes
        # @return [Array<Array>] what JSON can say, for {#initialize}
        def self.described(entries, first)
          entries.map do |entry|
            rank0 = first[entry.tensor.object_id] || entry.name.start_with?("extra.")
            [entry.name, entry.dtype, entry.whole || entry.shape, entry.regions&.map(&:to_a), entry.tensor.numel, rank0 ? true : false]
          end
        end

        # @param lists [Array<Array>] by rank, what {.described} gave
        # @raise [MismatchError] if ranks have different tensors
        # @raise [ArgumentError] if elements of a tensor are on no rank
        def initialize(lists)
          check_wholes(lists.map { |list| list.reject { |row| row[3] } })
          @wholes = lists.first.reject { |row| row[3] }
          @tensors = check_pieces(lists)
          @parts = Array.new(lists.size) { [] }
          assign
        end

        # @param rank [Integer]
        # @return [Array<Item>] what the rank writes
        def part(rank)
          @parts[rank]
        end

        # @return [Boolean] whether pieces have gaps
        def strided?
          @pieces.each_value.any? { |rows| rows.any? { |region, _| region.stride } }
        end

        # @yieldparam name [String]
        # @yieldparam dtype [String]
        # @yieldparam shape [Array<Integer>]
        # @yieldparam items [Array<Item>] what is written of it
        def each_tensor
          written = @parts.flatten.group_by(&:name)
          [*@wholes, *@tensors].each { |name, dtype, shape| yield name, dtype, shape, written.fetch(name, []) }
        end

        private

        def check_wholes(lists)
          rank = lists.index { |list| list.map { |row| row.first(3) } != lists.first.map { |row| row.first(3) } } or return
          place = lists.first.zip(lists[rank]).index { |mine, other| mine.first(3) != other&.first(3) } || lists.first.size
          one, other = [0, rank].map { |each| lists[each][place]&.then { |name, dtype, shape| "#{name} #{dtype} #{shape}" } || "nothing more" }
          raise MismatchError, "the ranks have different tensors, rank 0 #{one} where rank #{rank} has #{other}: what is not divided must be " \
            "the same on all"
        end

        # @return [Array<Array(String, String, Array)>] the tensors that are divided
        def check_pieces(lists)
          @pieces = Hash.new { |hash, key| hash[key] = [] }
          known = {}
          lists.each_with_index do |list, rank|
            list.each do |name, dtype, shape, regions, _, rank0|
              next unless regions

              first = known[name] ||= [rank, dtype, shape]
              raise MismatchError, differ(name, first, [rank, dtype, shape]) unless first.drop(1) == [dtype, shape]

              regions.each { |region| @pieces[name] << [Region.new(*region), rank, rank0] }
            end
          end
          known.each { |name, (_, _, shape)| check_covered(name, shape.inject(1, :*)) }
          known.map { |name, (_, dtype, shape)| [name, dtype, shape] }
        end

        def differ(name, *rows)
          one, two = rows.map { |rank, dtype, shape| "#{dtype} #{shape} on rank #{rank}" }
          "#{name} is #{one}, but #{two}"
        end

        def check_covered(name, total)
          gap = Region.gap(@pieces[name].map(&:first).uniq, total)
          return unless gap

          raise ArgumentError, "#{name}: element #{gap} of #{total} is on none of these ranks: expected all ranks that hold pieces of the " \
            "model"
        end

        def assign
          sizes = Array.new(@parts.size, 0)
          give = lambda do |item, ranks|
            rank = ranks.min_by { |each| [sizes[each], each] }
            @parts[rank] << item
            sizes[rank] += item.bytes
          end
          all = (0...@parts.size).to_a
          first, rest = @wholes.map { |name, dtype, shape, _, count, rank0| [Item.new(name, dtype, shape, count), rank0] }.partition(&:last)
          first.each { |item, _| give.call(item, [0]) }
          largest_first(divided).each { |item| give.call(item, item.ranks) }
          largest_first(rest.map(&:first)).each { |item| give.call(item, all) }
        end

        # Regions that only one rank has come first, so that the others can balance them.
        def divided
          @tensors.flat_map do |name, dtype, shape|
            @pieces[name].group_by(&:first).map do |region, rows|
              _, ranks, first = rows.transpose
              Item.new(name, dtype, shape, region.count, region, first.any? ? ranks.first(1) : ranks)
            end
          end
        end

        def largest_first(items)
          items.each_with_index.sort_by { |item, i| [item.ranks ? item.ranks.size : 0, -item.bytes, i] }.map(&:first)
        end
      end
    end
  end
end
