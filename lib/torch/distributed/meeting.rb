# frozen_string_literal: true

module Torch
  module Distributed
    # A meeting of ranks in a store: each gives a record, and gets those of all. The ranks that are missing are known, and a
    # rank that fails says why, which ends the meeting for all of them. Calls that wait can be interrupted and let other
    # threads run; one thread at a time uses a meeting.
    #
    # @!method initialize(store, name, rank, world_size, group = nil, members = nil)
    #   Makes no request yet.
    #   @param store [Store]
    #   @param name [String] of its keys, at most 60 bytes. It serves again once all ranks have left.
    #   @param group [ProcessGroup, nil] whose processes are watched while this one waits
    #   @param members [Array<Integer>, nil] each rank's in the group
    # @!method give(record)
    #   Gives this rank's record.
    #   @param record [String]
    # @!method await(timeout)
    #   Returns once all records are there.
    #   @param timeout [Numeric] seconds
    #   @raise [TimeoutError] if ranks are missing
    #   @raise [PeerLostError] if a rank has failed ({#failure}), or one that is missing has ended
    # @!method read
    #   Reads who has arrived, and waits for nobody.
    # @!method records
    #   @return [Array<String, nil>] by rank, as read last; nil for one that has not arrived
    # @!method failure
    #   @return [Array(Integer, String), nil] the first rank that has failed, and its reason, as read last
    # @!method fail(reason)
    #   This rank has failed: all that wait, or read, learn why. Takes two seconds at most, and raises nothing if the store is lost.
    #   @param reason [String] of which others get 1,023 bytes
    # @!method leave
    #   This rank needs the keys no more; the last rank that says so removes them.
    # @!method remove
    #   Removes the keys, which no rank needs any more, as this one knows.
    # @!method close
    #   Releases the store and the group.
    #
    # @api private
    class Meeting
      # @return [Array<Integer>] the ranks that have not arrived, as read last
      def missing
        records.each_with_index.filter_map { |record, rank| rank unless record }
      end
    end
  end
end
