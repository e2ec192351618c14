# frozen_string_literal: true

module Torch
  module Distributed
    # A call that all processes of a group must make with the same arguments, checked through the group's store: a rank
    # that calls something else, fails before, is interrupted or does not arrive, is reported on all ranks.
    #
    # Keys: `call` the call of the first rank to arrive; `at/RANK` this rank is there; `arrived` how many agree; `outcome`
    # set by the first rank that knows it; `finished` how many are done; `left` all are.
    #
    # @api private
    class Agreement
      # Seconds: between checks of the other processes (a TCP store serves one call at a time, so other threads also need
      # waits to be short); between log lines that name the missing ranks; how long the store's host waits for the
      # others after a failure; how long a process may take to end after its connections have.
      SLICE = 0.25
      REPORT_EVERY = 10
      LEAVE_TIMEOUT = 0.5
      END_TIMEOUT = 0.3

      # How much of a call is shown to the others, and the outcome if all agree.
      SHOWN = 160
      AGREED = "agreed"
      private_constant :SLICE, :REPORT_EVERY, :LEAVE_TIMEOUT, :END_TIMEOUT, :SHOWN, :AGREED

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
        report_failure(TorchDDP::PassingError.current) unless @outcome
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
        call = call.b
        first, theirs = @store.compare_set("call", "", "#{@rank} #{call}").split(" ", 2)
        @store.set("at/#{@rank}", "1")
        differ(call, first, theirs) unless theirs == call
        set_outcome_text(AGREED) if @store.add("arrived", 1) == @ranks.size
        @outcome || wait_for_outcome
        raise_outcome unless @outcome == AGREED
      end

      private

      def now
        Process.clock_gettime(Process::CLOCK_MONOTONIC)
      end

      # A store that is gone went with the process that hosts it, if one has just ended.
      def explained(error)
        limit = now + END_TIMEOUT
        rank, who = ended.first
        until rank
          return error if now > limit

          sleep(END_TIMEOUT / 30)
          rank, who = ended.first
        end

        PeerLostError.new("#{@operation}: lost global rank #{rank} (#{who}): its process has ended; seen here: #{error.message}")
      end

      # @return [Hash] the global ranks whose processes are known to have ended, and who they were
      def ended
        @ranks.to_h { |rank| [rank, @group._ended_peer(@group.group_rank(rank))] }.compact
      end

      def report_failure(cause)
        set_outcome(MismatchError, "global rank #{@rank} could not take part in #{@operation}: " +
          (cause ? [cause.message, "(#{cause.class.name})"].reject(&:empty?).join(" ") : "it was interrupted"))
      rescue Error
        # The store is lost, which is reported instead.
        nil
      end

      def differ(call, first, theirs)
        at = call.bytes.zip(theirs.bytes).index { |mine, other| mine != other } || call.size
        set_outcome(MismatchError, "the ranks disagree on a group: global rank #{@rank} calls #{excerpt(call, at)}, " \
          "global rank #{first} #{excerpt(theirs, at)}: all must make the same calls, in the same order")
        raise_outcome
      end

      # Long lists of ranks are shown from a little before the place where they differ.
      def excerpt(call, at)
        from = (call.size <= SHOWN) ? 0 : [at - SHOWN / 2, 0].max
        part = call[from, SHOWN].force_encoding(Encoding::UTF_8).scrub
        "#{"... " if from.positive?}#{part}#{" ..." if from + SHOWN < call.size}"
      end

      def set_outcome(kind, text)
        set_outcome_text("#{kind.name[/\w+\z/]} #{text}")
      end

      # The first outcome counts. Servers of PyTorch do not wake waiters for a key that compare_set created: it is set
      # again.
      def set_outcome_text(text)
        standing = @store.compare_set("outcome", "", text.b)
        @store.set("outcome", standing) if standing == text.b
        @outcome = standing.force_encoding(Encoding::UTF_8)
      end

      def wait_for_outcome
        report_at = @started + REPORT_EVERY
        until @outcome ||= wait_for("outcome")
          if now >= @started + @timeout
            return set_outcome(TimeoutError, "global rank #{@rank} waited #{@timeout.to_f.round(1)} s in vain for " \
              "#{name(missing)} to call #{@operation} as well")
          end
          check_processes
          next if now < report_at || @outcome

          report_at += REPORT_EVERY
          Distributed._warn "torch-ddp: global rank #{@rank} has waited #{(now - @started).round} s in #{@operation} for #{name(missing)}"
        end
      end

      def missing(ranks = @ranks)
        ranks.reject { |rank| @store.check(["at/#{rank}"]) }
      end

      # A process that has ended will not arrive.
      def check_processes
        gone = ended
        rank = missing(gone.keys).first
        return unless rank

        set_outcome(PeerLostError, "global rank #{rank} (#{gone[rank]}) has ended and will not call #{@operation} as well; " \
          "global rank #{@rank} has waited #{(now - @started).round(1)} s for it")
      end

      def wait_for(key)
        @store.wait([key], (@started + @timeout - now).clamp(0.01, SLICE))
        @store.get(key).force_encoding(Encoding::UTF_8)
      rescue TimeoutError
        nil
      end

      def name(ranks)
        shown = ranks.first(8).join(", ")
        "global rank#{"s" if ranks.size > 1} #{shown}#{", ... (#{ranks.size} in all)" if ranks.size > 8} of #{@ranks.size}"
      end

      def raise_outcome
        kind, text = @outcome.split(" ", 2)
        raise Distributed.const_get(kind), TorchDDP.printable(text)
      end

      # Global rank 0, which may host the store, leaves last.
      def leave(fine)
        @store.timeout = LEAVE_TIMEOUT unless fine
        @store.delete_key("at/#{@rank}") if fine
        @store.set("left", "1") if @store.add("finished", 1) == @ranks.size
        wait_until_all_left(fine) if @rank.zero?
      rescue Error
        # The earlier failure is reported instead.
        raise if fine
      end

      def wait_until_all_left(fine)
        # Others may still fail in making their group at their timeout: waits a moment longer.
        @timeout = fine ? @timeout + LEAVE_TIMEOUT : now - @started + LEAVE_TIMEOUT
        until wait_for("left")
          next if now < @started + @timeout
          return unless fine

          raise TimeoutError, "global rank 0 waited #{@timeout.to_f.round(1)} s in vain for " \
            "#{name(@ranks.select { |rank| @store.check(["at/#{rank}"]) })} to finish #{@operation}"
        end
      end
    end
  end
end
