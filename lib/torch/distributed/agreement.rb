# frozen_string_literal: true

module Torch
  module Distributed
    # One call that all processes of a group make alike, through the group's store: whoever asks for something else, is
    # refused an argument, is interrupted or does not come, is told to everybody.
    #
    # Keys: `terms` what the first to come asked for; `at/RANK` who is there and has not left; `arrived` how many agree;
    # `done` the verdict, which the first to know it gives; `parted` how many are through; `left` once all are.
    #
    # @api private
    class Agreement
      # Seconds: how often to look after the others (a TCP store serves one call at a time, so other threads also want
      # waits to be short); when to say who is missed; how long the store's host stays for the others' sake after a
      # failure; how long a process may take to end after its connections have.
      SLICE = 0.25
      TELL = 10
      FAREWELL = 0.5
      ENDING = 0.3

      # What the others are told of the terms, and the verdict if all agree.
      SHOWN = 160
      AGREED = "agreed"
      private_constant :SLICE, :TELL, :FAREWELL, :ENDING, :SHOWN, :AGREED

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

      # Runs the block, which is to call {#reach} once its arguments are checked; if it does not come to that, the
      # others learn why.
      def hold
        before = $!
        value = yield
        fine = true
        value
      rescue NetworkError, StoreError => e
        raise explained(e)
      ensure
        give_up($!.equal?(before) ? nil : $!) unless @verdict
        part(fine)
      end

      # Waits for all others.
      # @param terms [String] what this process asks for
      # @param timeout [Numeric] seconds since this was made
      # @raise [MismatchError] if somebody asks for something else
      # @raise [TimeoutError] naming those who did not come
      # @raise [PeerLostError] naming one that has ended
      def reach(terms, timeout = @timeout)
        @timeout = timeout
        @store.timeout = timeout
        terms = terms.b
        first, theirs = @store.compare_set("terms", "", "#{@rank} #{terms}").split(" ", 2)
        @store.set("at/#{@rank}", "1")
        differ(terms, first, theirs) unless theirs == terms
        settle_text(AGREED) if @store.add("arrived", 1) == @ranks.size
        @verdict || wait_for_verdict
        raise_verdict unless @verdict == AGREED
      end

      private

      def now
        Process.clock_gettime(Process::CLOCK_MONOTONIC)
      end

      # A store that is gone went with the process that hosts it, if one has just ended.
      def explained(error)
        limit = now + ENDING
        rank, who = ended.first
        until rank
          return error if now > limit

          sleep(ENDING / 30)
          rank, who = ended.first
        end

        PeerLostError.new("#{@operation}: lost global rank #{rank} (#{who}): its process has ended; seen here: #{error.message}")
      end

      # @return [Hash] the global ranks whose processes are known to have ended, and who they were
      def ended
        @ranks.to_h { |rank| [rank, @group._ended_peer(@group.group_rank(rank))] }.compact
      end

      def give_up(cause)
        settle(MismatchError, "global rank #{@rank} could not take part in #{@operation}: " +
          (cause ? [cause.message, "(#{cause.class.name})"].reject(&:empty?).join(" ") : "it was interrupted"))
      rescue Error
        # The store is gone: that is the news, and nobody can be told.
        nil
      end

      def differ(terms, first, theirs)
        at = terms.bytes.zip(theirs.bytes).index { |mine, other| mine != other } || terms.size
        settle(MismatchError, "the ranks disagree on a group: global rank #{@rank} calls #{excerpt(terms, at)}, " \
          "global rank #{first} #{excerpt(theirs, at)}: all must make the same calls, in the same order")
        raise_verdict
      end

      # Long lists of ranks are shown from a little before the place where they differ.
      def excerpt(terms, at)
        from = (terms.size <= SHOWN) ? 0 : [at - SHOWN / 2, 0].max
        part = terms[from, SHOWN].force_encoding(Encoding::UTF_8).scrub
        "#{"... " if from.positive?}#{part}#{" ..." if from + SHOWN < terms.size}"
      end

      def settle(kind, text)
        settle_text("#{kind.name[/\w+\z/]} #{text}")
      end

      # The first verdict stands. Servers of PyTorch do not wake those who wait for a key made by compare_set: it is
      # set again.
      def settle_text(text)
        standing = @store.compare_set("done", "", text.b)
        @store.set("done", standing) if standing == text.b
        @verdict = standing.force_encoding(Encoding::UTF_8)
      end

      def wait_for_verdict
        tell = @started + TELL
        until @verdict ||= wait_for("done")
          if now >= @started + @timeout
            return settle(TimeoutError, "global rank #{@rank} waited #{@timeout.to_f.round(1)} s in vain for " \
              "#{name(missing)} to call #{@operation} as well")
          end
          look_after_the_others
          next if now < tell || @verdict

          tell += TELL
          warn "torch-ddp: global rank #{@rank} has waited #{(now - @started).round} s in #{@operation} for #{name(missing)}"
        end
      end

      def missing(ranks = @ranks)
        ranks.reject { |rank| @store.check(["at/#{rank}"]) }
      end

      # A process that has ended will not come.
      def look_after_the_others
        gone = ended
        rank = missing(gone.keys).first
        return unless rank

        settle(PeerLostError, "global rank #{rank} (#{gone[rank]}) has ended and will not call #{@operation} as well; " \
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

      def raise_verdict
        kind, text = @verdict.split(" ", 2)
        raise Distributed.const_get(kind), text
      end

      # Global rank 0, which may host the store, leaves last.
      def part(fine)
        @store.timeout = FAREWELL unless fine
        @store.delete_key("at/#{@rank}") if fine
        @store.set("left", "1") if @store.add("parted", 1) == @ranks.size
        wait_until_all_left(fine) if @rank.zero?
      rescue Error
        # What went wrong before is the news.
        raise if fine
      end

      def wait_until_all_left(fine)
        # Others may fail in making their group when their time is over: a moment longer.
        @timeout = fine ? @timeout + FAREWELL : now - @started + FAREWELL
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
