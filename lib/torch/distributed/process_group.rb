# frozen_string_literal: true

module Torch
  module Distributed
    # Ranks that execute the same operations in the same order. Made by {Torch::Distributed.init_process_group} and
    # {Torch::Distributed.new_group}; it lives until {Torch::Distributed.destroy_process_group}, whether or not the
    # program still refers to it.
    #
    # Threads: groups are independent of each other, so each thread may have its own. Several threads may also use one
    # group, each call is queued whole; but every rank must queue the same operations in the same order, so threads
    # whose order is not determined need a lock that all their ranks acquire in the same order, or groups of their own.
    #
    # @!method rank
    #   @return [Integer] this process's place in the group
    # @!method size
    #   @return [Integer] how many ranks there are
    # @!method name
    #   @return [String]
    # @!method backend
    #   @return [String] "gloo" for instance
    # @!method closed?
    #   @return [Boolean] whether it was destroyed
    # @!attribute timeout
    #   @return [Float] how many seconds each operation may take
    class ProcessGroup
      # Global ranks that {#inspect} shows at most.
      SHOWN = 16
      COUNTERS = Mutex.new
      private_constant :SHOWN, :COUNTERS

      alias_method :world_size, :size

      # @return [String, nil] the `group_desc` that it was made with
      attr_reader :description
      alias_method :group_desc, :description

      # @return [Array<Integer>] the global ranks of its processes, by their rank in the group
      def ranks
        @ranks ||= Array.new(size) { |rank| rank }.freeze
      end

      # @param global_rank [Integer]
      # @return [Integer, nil] the rank in this group of the process with that global rank; nil if it is not in it
      def group_rank(global_rank)
        @places ||= ranks.each_with_index.to_h.freeze
        @places[global_rank]
      end

      # @return [String]
      def inspect
        return "#<#{self.class.name} destroyed>" if closed?

        shown = (ranks.size > SHOWN) ? "#{ranks.first(SHOWN).join(", ")}, ..." : ranks.join(", ")
        "#<#{self.class.name} #{name.inspect} #{backend} rank #{rank} of #{size}, global ranks [#{shown}]" \
          "#{", #{description.inspect}" if description}>"
      end
      alias_method :to_s, :inspect

      # @api private
      # @param ranks [Array<Integer>] global ranks
      # @param description [String, nil]
      def _describe(ranks, description)
        @ranks = ranks.dup.freeze
        @description = description&.to_s&.dup&.freeze
        self
      end

      # @api private
      # @param ranks [Array<Integer>, nil] those that count by themselves; nil: all of the group
      # @return [Integer] how many groups this process asked for before, for names that are the same on all ranks
      def _next_child(ranks = nil)
        COUNTERS.synchronize do
          @children ||= Hash.new(-1)
          @children[ranks] += 1
        end
      end
    end
  end
end
