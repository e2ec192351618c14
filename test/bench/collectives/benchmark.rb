# frozen_string_literal: true

require_relative "job"
require_relative "partners"
require_relative "results"

module Collectives
  # One run: all partners are started, then each round gives every one of them a turn at every measurement. Whoever
  # does not have the turn sleeps.
  class Benchmark
    PROBES = 2
    MOST = 4000
    LEAST = 5
    SLOW_US = 20_000 # of which three are enough
    # A timed call, the meeting before it, and its like in a loop, in calls.
    CALLS = 2.2

    # A measurement; `loop`: of calls back to back.
    Cell = Struct.new(:operation, :dtype, :bytes, :loop) do
      def back_to_back
        self.class.new(operation, dtype, bytes, true)
      end
    end
    # What one of a series takes in microseconds, beside its timed calls and for each of them.
    Cost = Struct.new(:fixed, :call) do
      def calls_within(share)
        ((share - fixed) / (call * CALLS)).to_i.clamp((call > SLOW_US) ? 3 : LEAST, MOST)
      end
    end

    # @param options [Hash] of collectives.rb
    # @param say [#call] takes lines of progress
    def initialize(options, say)
      @options = options
      @say = say
      @results = Results.new(options)
      @cells = options[:operations].product(options[:dtypes]).flat_map do |operation, dtype|
        (operation == "barrier") ? [Cell.new(operation, options[:dtypes].first, 0)] : options[:sizes].map { |bytes| Cell.new(operation, dtype, bytes) }
      end.uniq
      @jobs = {}
    end

    # @return [Results]
    def run
      seconds = @options[:seconds] / @options[:ranks].size.to_f
      @options[:ranks].each { |ranks| measure(ranks, seconds) }
      @results
    end

    # Ends all processes. Twice is harmless.
    def close
      # A second Ctrl-C must not leave half of them behind.
      before = trap("INT", "IGNORE")
      @jobs.each_value(&:close)
      @jobs.clear
    ensure
      trap("INT", before || "DEFAULT")
    end

    private

    def measure(ranks, seconds)
      start(ranks)
      deadline = now + seconds
      costs = probe(ranks, deadline)
      rounds = @options[:rounds]
      rounds.times do |round|
        left = deadline - now
        break if left <= 0

        share = left / (rounds - round) / [costs.size, 1].max * 1e6
        complete = turn_for_all(ranks, round, costs, share, deadline)
        @say.call("#{ranks} ranks: round #{round + 1} of #{rounds}#{" cut short: the time is over" unless complete}")
      end
    ensure
      close
    end

    def start(ranks)
      @options[:partners].each do |partner|
        next if @options[:operations].none? { |operation| partner.offers?(operation) }

        if (reason = partner.obstacle(ranks))
          skip(partner, ranks, reason)
          next
        end
        begin
          @jobs[partner] = Job.new(partner, ranks, bind: @options[:bind])
          @results.version(partner.name, @jobs[partner].version)
          @say.call("#{ranks} ranks: #{partner.name}: #{@jobs[partner].version}")
        rescue Job::Failed => e
          skip(partner, ranks, e.message)
        end
      end
    end

    # A few calls of everything, which also find out who does what.
    def probe(ranks, deadline)
      costs = {}
      each_turn(0) do |cell, partner, series|
        next if now > deadline

        started = now
        answer = ask(ranks, cell, partner, series, PROBES) or next
        call = [answer["mean"], 0.1].max
        costs[[cell, series]] = Cost.new([(now - started) * 1e6 - PROBES * call * CALLS, 0].max, call)
      end
      costs
    end

    def turn_for_all(ranks, round, costs, share, deadline)
      each_turn(round) do |cell, partner, series|
        return false if now > deadline

        cost = costs[[cell, series]] or next
        answer = ask(ranks, cell, partner, series, cost.calls_within(share)) or next
        cost.call = [answer["mean"], 0.1].max
        @results.add(ranks, cell, series, answer)
      end
      true
    end

    # Whoever begins finds the machine as the measurement before left it: each round another one does.
    def each_turn(round)
      @cells.each do |cell|
        @jobs.keys.rotate(round).each do |partner|
          next unless partner.offers?(cell.operation)

          partner.series.each { |series| yield cell, partner, series if @jobs.key?(partner) }
        end
      end
    end

    # @return [Hash, nil] nil if the partner does not do that, or failed
    def ask(ranks, cell, partner, series, iterations)
      answer = @jobs[partner].measure(cell.operation, cell.dtype, cell.bytes, iterations, series.memory, fresh: @options[:fresh],
        check: @options[:check])
      return answer unless answer["skip"]

      @results.skip("#{series.name}, #{cell.operation} of #{cell.dtype}", answer["skip"]) && nil
    rescue Job::Failed => e
      skip(partner, ranks, "#{cell.operation} of #{cell.bytes} bytes of #{cell.dtype}, #{series.memory} memory: #{e.message}")
      @results.failed = true
      @jobs.delete(partner).close
      nil
    end

    def skip(partner, ranks, reason)
      @results.skip("#{partner.name}, #{ranks} ranks", reason)
      @say.call("#{ranks} ranks: #{partner.name} left out: #{reason}")
    end

    def now
      Process.clock_gettime(Process::CLOCK_MONOTONIC)
    end
  end
end
