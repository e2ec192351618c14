# frozen_string_literal: true

module TorchDDP
  module FlightTrace
    # Compares the ranks' records of one group and finds the ranks that diverged.
    class Analysis
      # `kind` is :failure, :mismatch, :behind, :stuck, :message or :silent; `ranks` are the group's.
      Finding = Struct.new(:kind, :ranks, :operation, :text)

      attr_reader :name, :size

      # @param views [Array<Dump::Group>] of one group, at most one a rank
      def initialize(views)
        @views = views.sort_by(&:rank)
        @name = views.first.name
        @size = views.filter_map(&:size).max || views.size
        @members = views.flat_map(&:members).to_h { |member| [member["rank"], member] }
      end

      # @return [Array<Finding>] the likely cause first; empty: the ranks agree and nothing is under way
      def findings
        @findings ||= failures + mismatches + behind + messages + silent
      end

      # "rank 2 (host b12, pid 4711)"
      def who(rank)
        member = @members[rank]
        known = member ? [member["host"] && "host #{member["host"]}", member["pid"] && "pid #{member["pid"]}"].compact : []
        "rank #{rank}#{" (#{known.join(", ")})" unless known.empty?}"
      end

      # One line a rank: how far it came.
      def positions
        @views.map do |view|
          now = view.entries.reverse.find(&:waiting?)
          last = view.collectives.reverse.find { |entry| entry.state == "completed" }
          failed = view.collectives.find(&:failed?) unless now
          "#{who(view.rank)}: #{last ? "#{last} is done" : "nothing is done"}; " \
            "#{failed ? "#{failed} failed" : "in #{now || "no operation"}"}"
        end
      end

      private

      def failures
        first = @views.flat_map(&:entries).select(&:failed?).min_by { |entry| entry.ended_ns || Float::INFINITY }
        return [] unless first

        view = @views.find { |each| each.rank == first.rank }
        text = view.status["failure"] || first["status"]
        [Finding.new(:failure, [first.rank], first.to_s, "the first failure was on #{who(first.rank)}: #{text}")]
      end

      # The first operation on which two ranks disagree.
      def mismatches
        common_numbers.each do |number|
          sides = at(number).group_by { |_, entry| entry.signature }
          next if sides.size < 2

          text = sides.values.map { |side| "#{list(side.map(&:first))} ran #{side.first.last}" }.join("; ")
          return [Finding.new(:mismatch, sides.values.min_by(&:size).map(&:first), "operation #{number}",
            "operation #{number} differs: #{text}")]
        end
        []
      end

      # Who has not come to the operation in which others wait, or waited until it failed.
      def behind
        halted = @views.filter_map { |view| view.collectives.reverse.find(&:waiting?) || view.collectives.find(&:failed?) }
        return [] if halted.empty?

        furthest = halted.max_by(&:number)
        here = @views.select { |view| view.collectives.any? { |entry| entry.number == furthest.number } }
        absent = @views - here
        operation = furthest.to_s
        if absent.empty?
          return [] if here.size < @size || furthest.failed?

          return [Finding.new(:stuck, here.map(&:rank), operation, "all ranks are in #{operation} and none has ended it: look at the network between them")]
        end
        [Finding.new(:behind, absent.map(&:rank), operation,
          "#{absent.map { |view| "#{who(view.rank)} has not come to #{operation}: #{last_of(view)}" }.join("; ")}; " \
          "#{list(here.map(&:rank))} #{furthest.failed? ? "failed" : "wait#{"s" if here.size == 1}"} there")]
      end

      def last_of(view)
        now = view.entries.reverse.find(&:waiting?)
        return "it is in #{now}" if now

        last = view.collectives.last
        last ? "its last was #{last}, #{last.state}" : "it has queued nothing"
      end

      # Sends and receives that found no partner.
      def messages
        open = @views.flat_map(&:messages).select { |entry| %w[scheduled started].include?(entry.state) }
        open.map do |entry|
          target = entry["peer"].to_i.negative? ? "any rank" : who(entry["peer"])
          direction = (entry.kind == "send") ? "to" : "from"
          Finding.new(:message, [entry.rank, entry["peer"]].compact, entry.to_s,
            "#{who(entry.rank)} waits in #{entry} #{direction} #{target}")
        end
      end

      def silent
        missing = (0...@size).to_a - @views.map(&:rank)
        return [] if missing.empty?

        [Finding.new(:silent, missing, nil, "nothing was written by #{missing.map { |rank| who(rank) }.join(", ")}: dead, or not asked")]
      end

      # Numbers that every ring still holds, as far as all have come.
      def common_numbers
        numbers = @views.map { |view| view.collectives.map(&:number) }
        return [] if numbers.any?(&:empty?)

        numbers.flatten.uniq.select { |number| number.between?(numbers.map(&:min).max, numbers.map(&:max).min) }.sort
      end

      def at(number)
        @views.filter_map do |view|
          entry = view.collectives.find { |each| each.number == number }
          [view.rank, entry] if entry
        end
      end

      def list(ranks)
        (ranks.size == 1) ? "rank #{ranks.first}" : "ranks #{ranks.join(", ")}"
      end
    end
  end
end
