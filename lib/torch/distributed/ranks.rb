# frozen_string_literal: true

module Torch
  module Distributed
    # Stand-ins for a group where there is no {ProcessGroup}.
    module GroupMember
      # A place that is taken for a group.
      class Placeholder
        # @api private
        def initialize(name)
          @name = name
          freeze
        end

        # @return [String]
        def inspect
          "#<#{GroupMember.name}::#{@name}>"
        end
        alias_method :to_s, :inspect
      end
      private_constant :Placeholder

      # What {Groups#new_group} gives to the processes that are not in the new group: their rank in it is -1, and
      # an operation on it warns and does nothing.
      NON_GROUP_MEMBER = Placeholder.new("NON_GROUP_MEMBER")

      # The group of all processes, whichever that is when an operation is called. The same as nil.
      WORLD = Placeholder.new("WORLD")
    end

    # Who is who: a process has one global rank, that of the default group, and a rank in each group that it is
    # in. Arguments such as `src:` are global ranks, `group_src:` and its like ranks within the group.
    module Ranks
      # @param group [ProcessGroup, nil] nil: the default group
      # @return [Array<Integer>] the global ranks of a group, by their rank in it
      def get_process_group_ranks(group = nil)
        group_or_default(group).ranks
      end

      # @param group [ProcessGroup, nil] nil: the default group
      # @param global_rank [Integer]
      # @return [Integer] the rank in `group` of the process with this global rank
      # @raise [ArgumentError] if that process is not in the group
      def get_group_rank(group, global_rank)
        rank_in_group(group_or_default(group), "global_rank", global_rank, nil)
      end

      # @param group [ProcessGroup, nil] nil: the default group
      # @param group_rank [Integer]
      # @return [Integer] the global rank of the process that has this rank in `group`
      # @raise [ArgumentError] if the group has no such rank
      def get_global_rank(group, group_rank)
        group = group_or_default(group)
        group.ranks[check_group_rank(group, "group_rank", group_rank)]
      end

      private

      # The group that an operation works on, or nil for a process that is not in it: it is warned and the
      # operation returns, as in PyTorch.
      #
      #   return unless (group = member_group(group, "broadcast"))
      def member_group(group, operation)
        return group_or_default(group) unless GroupMember::NON_GROUP_MEMBER.equal?(group)

        warn_stranger(operation)
        nil
      end

      # The rank within `group` that an operation is asked for: either a global rank (`src: 3`) or one within the
      # group (`group_src: 1`). With neither it is the `default`, a global rank as well.
      #
      #   root = rank_in_group(group, "src", src, group_src)
      def rank_in_group(group, name, global_rank, group_rank, default: nil)
        unless group_rank.nil?
          return check_group_rank(group, "group_#{name}", group_rank) if global_rank.nil?

          raise ArgumentError, "#{name}: #{global_rank.inspect} and group_#{name}: #{group_rank.inspect} are both given, expected one: " \
            "#{name}: takes a global rank, group_#{name}: a rank within the group"
        end

        global_rank = default if global_rank.nil?
        (group.group_rank(global_rank) if global_rank.is_a?(Integer)) || raise(ArgumentError, wrong_rank(group, name, global_rank))
      end

      def check_group_rank(group, name, rank)
        return rank if rank.is_a?(Integer) && rank.between?(0, group.size - 1)

        raise ArgumentError, "#{name}: expected a rank within the group, from 0 to #{group.size - 1}, got #{rank.inspect}"
      end

      def wrong_rank(group, name, rank)
        return "#{name}: expected a rank from 0 to #{group.size - 1}, got #{rank.inspect}" if group.ranks == (0...group.size).to_a

        "#{name}: expected a global rank of #{group.inspect}, got #{rank.inspect}"
      end

      # Once for each line of the program.
      def warn_stranger(operation)
        line = caller_locations.find { |location| !location.absolute_path.to_s.start_with?(__dir__) }
        @warned ||= {}
        return if @warned[[line&.path, line&.lineno, operation]]

        @warned[[line&.path, line&.lineno, operation]] = true
        _warn "#{"#{line.path}:#{line.lineno}: " if line}warning: #{operation} on a group that global rank " \
          "#{default_process_group&.rank.inspect} is not in: nothing is done"
      end
    end
  end
end
