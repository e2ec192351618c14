# frozen_string_literal: true

require_relative "hosts"
require_relative "job"
require_relative "partners"
require_relative "results"

module Collectives
  # One run: all partners are started, then each round gives every one of them a turn at every measurement. Whoever
  # does not have the turn sleeps.
  class Benchmark
    MOST = 4000
    # Of the time of a turn what its timed calls may take: the rest are checks and warming up.
    SHARE = 0.7

    # A measurement; `loop`: of calls back to back.
    Cell = Struct.new(:operation, :dtype, :bytes, :loop) do
      def back_to_back
        self.class.new(operation, dtype, bytes, true)
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
      @jobs.each_value(&:close)
      @jobs.clear
      @hosts&.remove
      @hosts = nil
    end

    private

    def measure(ranks, seconds)
      @hosts = Hosts.new(@options[:hosts], @options[:rate]) if @options[:hosts] > 1
      start(ranks)
      @deadline = now + seconds
      rounds = @options[:rounds]
      rounds.times do |round|
        complete = turn_for_all(ranks, round, rounds - round)
        @say.call("#{ranks} ranks: round #{round + 1} of #{rounds}#{" cut short: the time is over" unless complete}")
        break unless complete
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
          @jobs[partner] = Job.new(partner, ranks, bind: @options[:bind], hosts: @hosts)
          @results.version(partner.name, @jobs[partner].version)
          @say.call("#{ranks} ranks: #{partner.name}: #{@jobs[partner].version}")
        rescue Job::Failed => e
          skip(partner, ranks, e.message)
        end
      end
    end

    # @return [Boolean] whether there was time for it
    def turn_for_all(ranks, round, rounds_left)
      turns = turns(round)
      turns.each_with_index do |(cell, partner, series), i|
        left = @deadline - now
        return false if left <= 0
        next unless @jobs.key?(partner)

        share = left / (rounds_left * turns.size - i) * SHARE * 1e6
        answer = ask(ranks, cell, partner, series, share)
        @results.add(ranks, cell, series, answer) if answer
      end
      true
    end

    # Whoever begins finds the machine as the measurement before left it: each round another one does.
    def turns(round)
      @cells.flat_map do |cell|
        @jobs.keys.rotate(round).select { |partner| partner.offers?(cell.operation) }
          .flat_map { |partner| partner.series.map { |series| [cell, partner, series] } }
      end
    end

    # @return [Hash, nil] nil if the partner does not do that, or failed
    def ask(ranks, cell, partner, series, microseconds)
      answer = @jobs[partner].measure(cell.operation, cell.dtype, cell.bytes, MOST, microseconds, series.memory,
        fresh: @options[:fresh], check: @options[:check])
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
