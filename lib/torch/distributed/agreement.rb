# frozen_string_literal: true

require "digest"

module Torch
  module Distributed
    # A call that all processes of a group must make with the same arguments: they meet in the group's store, each with its
    # call as its record. A rank that calls something else, fails before, is interrupted or does not arrive, is reported on
    # all ranks: the first failure of the meeting is the outcome for all of them.
    #
    # All records are one value in the store, which each rank reads: a long call lies beside it, once for all ranks that make
    # the same call, whose records are its digest. The text is read where they differ.
    #
    # The ranks meet a second time to leave, for which global rank 0, which may host the store, waits.
    #
    # @api private
    class Agreement
      # Seconds: between log lines that name the missing ranks; how long the store's host waits for the others after a
      # failure; how long a process may take to end after its connections have.
      REPORT_EVERY = 10
      LEAVE_TIMEOUT = 0.5
      END_TIMEOUT = 0.3

      # How much of a call is shown to the others; what is longer is a long call.
      SHOWN = 160

      # How the keys of long calls' texts begin; no call begins so.
      TEXT = "text/"
      private_constant :REPORT_EVERY, :LEAVE_TIMEOUT, :END_TIMEOUT, :SHOWN, :TEXT

      # @param store [Store] for this call alone
      # @param operation [String] for the texts: "new_group"
      # @param group [ProcessGroup]
      # @param ranks [Array<Integer>] the global ranks of those of it that take part
      def initialize(store, operation, group, ranks = group.ranks)
        @store = store
        @operation = operation
        @group = group
        @ranks = ranks
        @rank = group.ranks[group.rank]
        @timeout = group.timeout
        @started = now
        @calls = meet("calls")
      end

      # Runs the block, which must call {#reach} once its arguments are checked; if it fails before, the reason is reported
      # on the other ranks.
      def hold
        value = yield
        fine = true
        value
      rescue NetworkError, StoreError => e
        raise explained(e)
      ensure
        report_failure(TorchDDP::PassingError.current) unless @decided
        leave(fine)
      end

      # Waits for all others.
      # @param call [String] the call with its arguments
      # @param timeout [Numeric] seconds since this was made
      # @raise [MismatchError] if a rank makes another call
      # @raise [TimeoutError] naming the ranks that did not arrive
      # @raise [PeerLostError] naming a rank whose process has ended
      def reach(call, timeout = @timeout)
        @timeout = timeout
        @store.timeout = timeout
        @calls.give((call.bytesize > SHOWN) ? stored(call) : call)
        @calls.read
        text = difference
        text ? decide(MismatchError, text) : wait_for_others
        @decided = true
      end

      private

      def now
        Process.clock_gettime(Process::CLOCK_MONOTONIC)
      end

      def meet(name)
        Meeting.new(@store, name, @ranks.index(@rank), @ranks.size, @group, @ranks.map { |rank| @group.group_rank(rank) })
      end

      # A store that is gone went with the process that hosts it, if one has just ended.
      def explained(error)
        limit = now + END_TIMEOUT
        rank, who = ended
        until rank
          return error if now > limit

          sleep(END_TIMEOUT / 30)
          rank, who = ended
        end

        PeerLostError.new("#{@operation}: lost global rank #{rank} (#{who}): its process has ended; seen here: #{error.message}")
      end

      # @return [Array(Integer, String), nil] a global rank whose process is known to have ended, and who it was
      def ended
        @ranks.to_h { |rank| [rank, @group._ended_peer(@group.group_rank(rank))] }.compact.first
      end

      def report_failure(cause)
        @calls.fail(reason(MismatchError, "global rank #{@rank} could not take part in #{@operation}: " +
          (cause ? [cause.message, "(#{cause.class.name})"].reject(&:empty?).join(" ") : "it was interrupted")))
      end

      def reason(kind, text)
        "#{kind.name[/\w+\z/]} #{TorchDDP.printable(text)}"
      end

      # @return [String] the record of a long call: the key at which its text lies
      def stored(call)
        key = "#{TEXT}#{Digest::SHA256.hexdigest(call)}"
        @store.set(key, call) unless @store.check([key])
        @text = key
      end

      # @return [String] the call of which a record is
      def text_of(record)
        record.start_with?(TEXT) ? @store.get(record) : record
      end

      # Removes the texts of long calls that this rank knows of; no rank reads them any more.
      def delete_texts(records)
        [@text, *records].compact.uniq.each { |record| @store.delete_key(record) if record.start_with?(TEXT) }
      end

      # What the ranks that have arrived disagree on; the same text on all ranks that have read the same.
      #
      # @return [String, nil]
      def difference
        first, second = @calls.records.each_with_index.select(&:first).uniq(&:first)
        return unless second

        (mine, rank), (other, other_rank) = [first, second].map { |record, place| [text_of(record), place] }
        at = mine.bytes.zip(other.bytes).index { |one, another| one != another } || mine.bytesize
        "the ranks disagree on a group: global rank #{@ranks[rank]} calls #{excerpt(mine, at)}, global rank #{@ranks[other_rank]} " \
          "#{excerpt(other, at)}: all must make the same calls, in the same order"
      end

      # Long lists of ranks are shown from a little before the place where they differ.
      def excerpt(call, at)
        from = (call.size <= SHOWN) ? 0 : [at - SHOWN / 2, 0].max
        part = call[from, SHOWN].force_encoding(Encoding::UTF_8).scrub
        "#{"... " if from.positive?}#{part}#{" ..." if from + SHOWN < call.size}"
      end

      # The first failure counts, unless all had arrived before it.
      def decide(kind, text)
        @calls.fail(reason(kind, text))
        @calls.await(0)
        agree
      rescue TimeoutError, PeerLostError
        raise_failure || fail_with(kind, text)
      end

      # All have arrived, and each compares.
      def agree
        text = difference
        fail_with(MismatchError, text) if text
        delete_texts([]) if @rank == @ranks.first
      end

      # @return [nil] if no rank has failed
      def raise_failure
        _, reason = @calls.failure
        return unless reason

        kind, text = reason.force_encoding(Encoding::UTF_8).scrub.split(" ", 2)
        fail_with(Distributed.const_get(kind), text)
      end

      def fail_with(kind, text)
        @decided = true
        raise kind, TorchDDP.printable(text), cause: nil
      end

      def wait_for_others
        deadline = @started + @timeout
        report_at = @started + REPORT_EVERY
        begin
          @calls.await([[deadline, report_at].min - now, 0].max)
        rescue TimeoutError
          return report_missing if now >= deadline

          report_at += REPORT_EVERY
          Distributed._warn "torch-ddp: global rank #{@rank} has waited #{(now - @started).round} s in #{@operation} for #{missing(@calls)}"
          retry
        rescue PeerLostError => e
          return raise_failure || report_lost(e.message)
        end
        agree
      end

      def report_missing
        decide(TimeoutError, "global rank #{@rank} waited #{@timeout.to_f.round(1)} s in vain for #{missing(@calls)} to call #{@operation} as well")
      end

      # A process that has ended will not arrive.
      def report_lost(who)
        decide(PeerLostError, "#{who} and will not call #{@operation} as well; global rank #{@rank} has waited #{(now - @started).round(1)} s for it")
      end

      def missing(meeting)
        ranks = meeting.missing.map { |place| @ranks[place] }
        shown = ranks.first(8).join(", ")
        "global rank#{"s" if ranks.size > 1} #{shown}#{", ... (#{ranks.size} in all)" if ranks.size > 8} of #{@ranks.size}"
      end

      # Where global rank 0 takes no part, nobody waits.
      def leave(fine)
        @store.timeout = LEAVE_TIMEOUT unless fine
        return leave_without_host(fine) unless @ranks.include?(0)

        leaving = meet("leaving")
        leaving.give("")
        wait_until_all_left(leaving, fine) if @rank.zero?
      rescue Error
        # The earlier failure is reported instead.
        raise if fine
      ensure
        [@calls, leaving].each { |meeting| meeting&.close }
      end

      # The last one removes the keys, here and in the store.
      def leave_without_host(fine)
        @calls.read unless fine
        records = @calls.records
        @calls.leave
        delete_texts(records) unless fine || @store.check(["calls/left"])
      end

      def wait_until_all_left(leaving, fine)
        # Others may still fail in making their group at their timeout: waits a moment longer.
        leaving.await(fine ? [@started + @timeout + LEAVE_TIMEOUT - now, 0].max : LEAVE_TIMEOUT)
        @calls.read unless fine
        delete_texts(@calls.records) unless fine
        [@calls, leaving].each(&:remove)
      rescue TimeoutError
        raise TimeoutError, "global rank 0 waited #{@timeout.to_f.round(1)} s in vain for #{missing(leaving)} to finish #{@operation}", cause: nil
      rescue PeerLostError => e
        raise PeerLostError, "#{@operation}: #{e.message} before it had finished", cause: nil
      end
    end
  end
end
