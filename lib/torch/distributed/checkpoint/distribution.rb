# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # Which rank writes what of a checkpoint, computed alike on all ranks from what each of them has: a region goes to one of
      # the ranks that have it, and what several have to that one of them that has least to write. What rank 0 is to say of is, where only some
      # ranks have it, said by the first of these.
      #
      # @api private
      class Distribution
        # How the names of tensors begin that rank 0 has to say of.
        EXTRA = "extra."
        private_constant :EXTRA

        # What is written: all of a tensor (region nil), or a part of it; and which ranks have it.
        Item = Struct.new(:name, :dtype, :shape, :count, :region, :ranks) do
          def bytes
            DTYPES.fetch(dtype).bytes * count
          end
        end

        # @param entries [Array<Tree::Entry>]
        # @param first [Hash{Integer => true}] the object_ids of tensors that rank 0 writes
        # @param compare [Boolean] whether values are compared that must be the same on all ranks
        # @return [Array<Array>] what JSON can say, for {#initialize}
        def self.described(entries, first, compare: true)
          entries.map do |entry|
            rank0 = first[entry.tensor.object_id] || entry.name.start_with?(EXTRA)
            sum = DataFile.checksum(entry.tensor) if compare && entry.compared && !rank0
            [entry.name, entry.dtype, entry.whole || entry.shape, entry.regions&.map(&:to_a), entry.tensor.numel, rank0 ? true : false, sum]
          end
        end

        # @param lists [Array<Array>] by rank, what {.described} gave
        # @param spread [Boolean] whether ranks share what several of them have; false: the first of these writes it
        # @raise [MismatchError] if ranks have different tensors under one name
        # @raise [ArgumentError] if elements of a tensor are on no rank
        def initialize(lists, spread: true)
          @spread = spread
          check_extra(lists) if spread
          lists = lists.each_with_index.map { |list, rank| rank.zero? ? list : list.reject { |row| row[0].start_with?(EXTRA) } }
          @wholes = check_wholes(lists)
          @tensors = check_pieces(lists)
          @parts = Array.new(lists.size) { [] }
          assign
        end

        # @return [String, nil] a tensor that rank 0 has not
        def elsewhere
          @wholes.find { |row| row[5].first.positive? }&.first
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

        # Rank 0's are saved, and where all ranks write they must know of all.
        def check_extra(lists)
          extra = lists.map { |list| list.select { |row| row[0].start_with?(EXTRA) }.map { |row| row.first(3) } }
          rank = extra.index { |rows| rows != extra.first } or return
          place = extra.first.zip(extra[rank]).index { |mine, other| mine != other } || extra.first.size
          one, other = [0, rank].map { |each| extra[each][place]&.then { |name, dtype, shape| "#{name} #{dtype} #{shape}" } || "nothing more" }
          raise MismatchError, "the ranks have different tensors, rank 0 #{one} where rank #{rank} has #{other}: with sharded: true all must " \
            "save the same extra"
        end

        # @return [Array<Array(String, String, Array, Integer, Boolean, Array<Integer>)>] the tensors that are not divided, and who has them
        def check_wholes(lists)
          known = {}
          lists.each_with_index do |list, rank|
            list.each do |name, dtype, shape, regions, count, rank0, sum|
              next if regions

              first = known[name] ||= [[rank, dtype, shape, sum], count, rank0, []]
              check_same(name, first[0], [rank, dtype, shape, sum])
              first[3] << rank
            end
          end
          known.map { |name, ((_, dtype, shape), *rest)| [name, dtype, shape, *rest] }
        end

        def check_same(name, one, two)
          raise MismatchError, differ(name, one, two) unless one[1, 2] == two[1, 2]
          return if one[3] == two[3]

          raise MismatchError, "the ranks have different tensors: #{name} has other values on rank #{two[0]} than on rank #{one[0]}: expected the same " \
            "on all ranks, a name of its own for each, or models and optimizers themselves rather than their state_dict"
        end

        # @return [Array<Array(String, String, Array)>] the tensors that are divided
        def check_pieces(lists)
          @pieces = Hash.new { |hash, key| hash[key] = [] }
          known = {}
          holders = @wholes.to_h { |row| [row[0], row[5].first] }
          lists.each_with_index do |list, rank|
            list.each do |name, dtype, shape, regions, _, rank0|
              next unless regions

              if holders.key?(name)
                raise MismatchError, "the ranks have different tensors: #{name} is divided on rank #{rank}, but not on rank #{holders[name]}"
              end

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
          "the ranks have different tensors: #{name} is #{one}, but #{two}"
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
          items = @wholes.map { |name, dtype, shape, count, rank0, ranks| [Item.new(name, dtype, shape, count, nil, ranks), rank0] }
          first, rest = items.partition { |_, rank0| rank0 || !@spread }
          first.each { |item, _| give.call(item, item.ranks.first(1)) }
          largest_first(divided + rest.map(&:first)).each { |item| give.call(item, item.ranks) }
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
          items.each_with_index.sort_by { |item, i| [item.ranks.size, -item.bytes, i] }.map(&:first)
        end
      end
    end
  end
end
