# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # Makes one state of those of all ranks, computed alike on each of them: names that only some ranks have are kept, and what several
      # ranks have under one name must be equal.
      #
      # @api private
      class Merging
        # What {Tree#kinds} says of a state within it. A model's is the same on all ranks that have it; a part of a model's has the names that
        # the rank knows; an optimizer's has the parameters that the rank knows.
        MODEL = "model"
        PART = "part"
        NAMED = "named"

        # @param said [Array<Array(Object, Hash)>] by rank, what {Tree#pack} made and {Tree#kinds}
        def initialize(said)
          @said = said
        end

        # @return [Object] what {Tree#pack} would make of all
        # @raise [MismatchError] naming what differs and two ranks
        def result
          @kinds = @said.map(&:last)
          merged("", @said.each_with_index.map { |(packed, _), rank| [rank, packed] })
        end

        private

        # @param path [String] ".model.weight"
        # @param values [Array<Array(Integer, Object)>] ranks, and what they have there
        def merged(path, values)
          # An empty Hash stands for what another rank has.
          values = values.reject { |_, value| value == {} }.then { |rest| rest.empty? ? values.first(1) : rest }
          kinds = values.map { |rank, _| @kinds[rank][path.delete_prefix(".")] }.uniq
          differ(path, values) if kinds.size > 1
          return merged_states(path, values) if kinds.first == NAMED
          return values.first.last if values.all? { |_, value| value == values.first.last }
          return merged_pairs(path, values) if kinds.first != MODEL && values.all? { |_, value| Tree.pairs?(value) }
          return merged_rows(path, values) if values.map { |_, value| value.is_a?(Array) && value.size }.uniq.then { |sizes| sizes.size == 1 && sizes[0] }

          differ(path, values)
        end

        def merged_pairs(path, values)
          known = {}
          values.each { |rank, value| Tree.pairs(value).each { |key, each| (known[key] ||= []) << [rank, each] } }
          Tree.of_pairs(known.map { |key, each| [key, merged("#{path}.#{Tree.text(key)}", each)] })
        end

        def merged_rows(path, values)
          Array.new(values.first.last.size) { |i| merged("#{path}.#{i}", values.map { |rank, value| [rank, value[i]] }) }
        end

        # Of optimizers: all know the same groups, and each some of their parameters.
        def merged_states(path, values)
          known = {}
          values.each do |rank, value|
            value["state"].each do |parameter, state|
              first, other = known[parameter] ||= [rank, state]
              differ_in_state(path, parameter, [[first, other, state], [rank, state, other]]) unless other == state
            end
          end
          groups = merged_groups(path, values)
          order = groups.flat_map { |group| group["params"] }.uniq
          values.first.last.merge("state" => order.filter_map { |each| [each, known[each].last] if known.key?(each) }.to_h, "param_groups" => groups)
        end

        # Their options are those of the first.
        def merged_groups(path, values)
          (first, one), *others = values.map { |rank, value| [rank, value["param_groups"]] }
          rank, other = others.find { |_, groups| groups.size != one.size }
          fail_with(path, "it has #{one.size} parameter groups on rank #{first}, but #{other.size} on rank #{rank}") if rank

          one.each_with_index.map do |group, i|
            group.merge("params" => [one, *others.map(&:last)].flat_map { |groups| groups[i]["params"] }.uniq)
          end
        end

        def differ_in_state(path, parameter, sides)
          one, two = sides.map do |rank, own, other|
            "#{own.reject { |key, value| other[key] == value }.map { |key, value| "#{key}: #{value.inspect[0, 60]}" }.join(", ")} on rank #{rank}"
          end
          fail_with(path, "the state of #{parameter} has #{one}, but #{two}: expected the same steps on all ranks")
        end

        # A model's differences are found in its names.
        def differ(path, values)
          (first, one), (rank, other) = values.first, values.find { |_, value| value != values.first.last } || values.last
          if [one, other].all? { |value| Tree.pairs?(value) }
            [[one, other, first, rank], [other, one, rank, first]].each do |mine, others, has, lacks|
              name = only_in(mine, others) or next
              raise MismatchError, "the ranks have different tensors: #{"#{path}.#{name}".delete_prefix(".")} is on rank #{has} and not on rank #{lacks}: " \
                "expected the same names on all ranks that have this state, a name of its own for each, or of stages a method " \
                "distributed_state_dict_partial?"
            end
          end
          differ_within(path, first, one, rank, other)
          texts = [one, other].map { |value| Tree.shown(value) }
          texts = ["of one kind", "of another"] if texts.uniq.size == 1
          fail_with(path, "it is #{texts[0]} on rank #{first}, but #{texts[1]} on rank #{rank}: expected the same on all ranks, or a name of its own " \
            "for each")
        end

        def differ_within(path, first, one, rank, other)
          mine, others = [one, other].map { |value| rows_of(value) }
          return unless mine && others && mine.size == others.size

          key = mine.keys.find { |each| mine[each] != others[each] }
          differ("#{path}.#{key}", [[first, mine[key]], [rank, others[key]]]) if key
        end

        # @return [Hash{String => Object}, nil] nil: the value has no parts
        def rows_of(value)
          return value.each_with_index.to_h { |each, i| [i.to_s, each] } if value.is_a?(Array)

          Tree.pairs(value).to_h { |key, each| [Tree.text(key), each] } if Tree.pairs?(value)
        end

        def only_in(one, other)
          key = (Tree.pairs(one).map(&:first) - Tree.pairs(other).map(&:first)).first
          key && Tree.text(key)
        end

        def fail_with(path, text)
          raise MismatchError, "#{path.delete_prefix(".")}: #{text}"
        end
      end
    end
  end
end
