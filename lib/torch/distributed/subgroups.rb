# frozen_string_literal: true

require "digest"

module Torch
  module Distributed
    # Groups of some of the ranks.
    #
    # All processes of the parent group (the default group, where none is given) make these calls, members or not, with
    # the same arguments and in the same order; each returns when all have come. What one of them is refused, what they
    # disagree on, and ranks that do not arrive, are reported on all of them.
    module Subgroups
      LOCK = Mutex.new
      private_constant :LOCK

      # Makes a group of some of the processes.
      #
      # @param ranks [Array<Integer>, nil] global ranks; nil: all
      # @param timeout [Numeric, nil] seconds: of this call, and of each operation later; nil: the default group's
      # @param backend [String, Symbol, nil] nil: the default group's
      # @param group_desc [String, nil] what the group is for; shown by {ProcessGroup#inspect}
      # @param use_local_synchronization [Boolean] whether only the members make this call. Two that have ranks in
      #   common must then be made in the same order by these.
      # @param sort_ranks [Boolean] false: ranks in the group follow the order of `ranks`
      # @return [ProcessGroup, Object] {GroupMember::NON_GROUP_MEMBER} on processes that are not in it
      # @raise [ArgumentError, TypeError] if the ranks are none
      # @raise [MismatchError] if another process asks for other ranks, or is refused
      # @raise [TimeoutError] naming the processes that did not come
      # @raise [PeerLostError] naming one of this machine that has ended instead
      def new_group(ranks = nil, timeout: nil, backend: nil, group_desc: nil, use_local_synchronization: false, sort_ranks: true)
        parent = group_or_default(nil)
        options = {timeout: timeout, backend: backend, group_desc: group_desc}
        checked = lambda do
          list = check_ranks("ranks", ranks.nil? ? parent.ranks : ranks, parent)
          [sort_ranks ? list.sort : list]
        end
        return form_groups(parent, "new_group", **options, &checked).first unless use_local_synchronization

        members = checked.call.first
        return GroupMember::NON_GROUP_MEMBER unless members.include?(parent.rank)

        form_groups(parent, "new_group", members: members.sort, **options) { [members] }.first
      end

      # Cuts a group into groups of the same size, each of consecutive ranks.
      #
      # @param group_size [Integer, nil] nil: the number of processes on this machine (LOCAL_WORLD_SIZE)
      # @param group [ProcessGroup, nil] what is cut; nil: the default group
      # @return [Array(ProcessGroup, Array)] this process's group, and all: {GroupMember::NON_GROUP_MEMBER} for the others
      # @raise [ArgumentError] if the size does not divide the group's
      # @see #new_group for the other arguments and errors
      def new_subgroups(group_size = nil, group: nil, timeout: nil, backend: nil, group_desc: nil)
        return unless (parent = member_group(group, "new_subgroups"))

        groups = form_groups(parent, "new_subgroups", timeout: timeout, backend: backend, group_desc: group_desc) do
          parent.ranks.each_slice(check_group_size(group_size, parent)).to_a
        end
        [groups.find { |each| each.is_a?(ProcessGroup) }, groups]
      end

      # Makes groups of processes that are listed; no process may be in two of them.
      #
      # @param ranks_per_subgroup_list [Array<Array<Integer>>] global ranks of each, in any order
      # @return [Array(Object, Array)] this process's group ({GroupMember::NON_GROUP_MEMBER} if it is in none), and all
      # @see #new_group for the other arguments and errors
      def new_subgroups_by_enumeration(ranks_per_subgroup_list, timeout: nil, backend: nil, group_desc: nil)
        parent = group_or_default(nil)
        groups = form_groups(parent, "new_subgroups_by_enumeration", timeout: timeout, backend: backend, group_desc: group_desc) do
          check_lists("ranks_per_subgroup_list", ranks_per_subgroup_list, parent).map(&:sort)
        end
        [groups.find { |each| each.is_a?(ProcessGroup) } || GroupMember::NON_GROUP_MEMBER, groups]
      end

      # Splits a group. Only its processes make this call.
      #
      # @param parent [ProcessGroup, nil] nil: the default group
      # @param split_ranks [Array<Array<Integer>>] ranks within the parent, of each part; no rank may be in two of them
      # @return [ProcessGroup, Object] this process's part; {GroupMember::NON_GROUP_MEMBER} if it is in none
      # @see #new_group for the other arguments and errors
      def split_group(parent = nil, split_ranks = nil, timeout: nil, backend: nil, group_desc: nil)
        return GroupMember::NON_GROUP_MEMBER unless (parent = member_group(parent, "split_group"))

        groups = form_groups(parent, "split_group", timeout: timeout, backend: backend, group_desc: group_desc) do
          lists = check_lists("split_ranks", split_ranks, parent, (0...parent.size).to_a)
          lists.map { |list| list.sort.map { |rank| parent.ranks[rank] } }
        end
        groups.find { |each| each.is_a?(ProcessGroup) } || GroupMember::NON_GROUP_MEMBER
      end

      private

      # Makes a group of each of the block's lists of global ranks; `members` are those that come, nil is all of the
      # parent, and `asked` gives what they must agree on, if not the lists. A process may be in several groups, as long
      # as lists that overlap can be made one after the other.
      def form_groups(parent, operation, timeout: nil, backend: nil, group_desc: nil, members: nil, asked: nil)
        label = group_label(parent, members)
        with_store_of(parent, label) do |store, talk|
          agreement = Agreement.new(talk, operation, parent, members || parent.ranks)
          agreement.hold do
            check_timeout(timeout) unless timeout.nil?
            timeout ||= parent.timeout
            backend = (backend || parent.backend).to_s
            ProcessGroup._find_backend(backend)
            lists = yield
            terms = asked&.call || ((lists.size == 1) ? lists : [lists])
            agreement.reach("#{operation}(#{terms.map(&:inspect).join(", ")}, backend: #{backend.inspect})", timeout)
            lists.each_with_index.map do |list, index|
              form_group(parent, store, (lists.size == 1) ? label : "#{label}.#{index}", list, backend, timeout,
                group_desc.respond_to?(:call) ? group_desc.call(list) : group_desc, members.nil? && backend == parent.backend)
            end
          end
        end
      end

      # Yields a group's part of the store, and the part of that for one agreement. A connection serves one call at a
      # time, and waits at that: threads that make groups at the same time get connections of their own.
      def with_store_of(parent, label)
        others = LOCK.synchronize { (@forming = (@forming || 0) + 1) - 1 }
        shared = parent._store
        store = others.zero? ? shared : shared._clone
        talk = PrefixStore.new("agreement/#{label}", store)
        yield store, talk
      ensure
        # They would keep the store, and a server behind it, beyond the groups' end.
        [talk, store, shared].each { |each| each&.close }
        LOCK.synchronize { @forming -= 1 }
      end

      def group_label(parent, members)
        return "group_#{parent._next_child}" unless members

        ranks = members.join("_")
        ranks = Digest::SHA256.hexdigest(ranks)[0, 16] if ranks.size > 16
        "group_of_#{ranks}.#{parent._next_child(members)}"
      end

      # `split`: all of the parent take part, so that what it has may be divided.
      def form_group(parent, store, name, ranks, backend, timeout, description, split)
        rank = parent.ranks[parent.rank]
        place = ranks.index(rank)
        unless place
          parent._decline(timeout) if split
          return GroupMember::NON_GROUP_MEMBER
        end

        default = @default
        index = device_index(default.device_id, rank, default.group.size) if backend.include?("nccl")
        Backend._serve(backend)
        group = ProcessGroup._create(backend, name, store, place, ranks.size, timeout, index, !default.device_id.nil?, parent,
          split)
        group._describe(ranks, description)
        keep(group)
      rescue Error => e
        raise e.exception("#{e.message} (the group's ranks from 0 are the global ranks #{ranks.first(32).join(", ")}#{", ..." if ranks.size > 32})")
      end

      def check_ranks(name, ranks, parent, known = parent.ranks)
        raise TypeError, "#{name}: expected an Array of ranks, got #{ranks.inspect}" unless ranks.is_a?(Array)
        raise ArgumentError, "#{name}: expected ranks, got an empty Array" if ranks.empty?

        wrong = ranks.index { |rank| !known.include?(rank) || !rank.is_a?(Integer) }
        if wrong
          raise ArgumentError, "#{name}: expected ranks of the parent group, " \
            "#{(known == (0...known.size).to_a) ? "0 to #{known.size - 1}" : known.join(", ")}, got #{ranks[wrong].inspect} in #{ranks.inspect}"
        end
        twice = ranks.tally.find { |_, times| times > 1 }
        raise ArgumentError, "#{name}: rank #{twice.first} is there #{twice.last} times: #{ranks.inspect}" if twice

        ranks
      end

      def check_lists(name, lists, parent, known = parent.ranks)
        raise TypeError, "#{name}: expected an Array of Arrays of ranks, got #{lists.inspect}" unless lists.is_a?(Array)
        raise ArgumentError, "#{name}: expected lists of ranks, got an empty Array" if lists.empty?

        seen = {}
        lists.each_with_index do |list, index|
          check_ranks("#{name}[#{index}]", list, parent, known).each do |rank|
            raise ArgumentError, "#{name}: rank #{rank} is in both #{lists[seen[rank]].inspect} and #{list.inspect}" if seen[rank]

            seen[rank] = index
          end
        end
      end

      def check_group_size(size, parent)
        size = Rendezvous.env_integer("LOCAL_WORLD_SIZE") || parent.size if size.nil?
        return size if size.is_a?(Integer) && size.positive? && (parent.size % size).zero?

        raise ArgumentError, "group_size: expected a divisor of the group's size #{parent.size}, got #{size.inspect}"
      end
    end
  end
end
