# frozen_string_literal: true

require "json"
require_relative "intervals"

module TorchDDP
  module Trace
    # An error in the given files.
    class Unreadable < StandardError; end

    # One rank's file, as include/tddp/trace.h describes it. It has an event a line, so that one of which the end is
    # missing or damaged is read as far as it goes.
    class RankFile
      # In a trace of one rank, by the name that it has in the lane "training"; and all of the other lane.
      KINDS = %w[forward backward wait optimizer data].freeze

      attr_reader :path, :rank, :host, :wall_offset_ns, :damaged, :first, :last

      def initialize(path)
        @path = path
        @damaged = 0
        @times = Hash.new { |times, kind| times[kind] = Intervals.new }
        each_event { |event| take(event) }
        raise Unreadable, "#{path}: not a trace that TDDP_TRACE made: its first event is missing" unless @rank
      end

      # @yieldparam event [Hash]
      def each_event
        @damaged = 0
        File.foreach(@path) do |line|
          text = line.scrub.strip.delete_suffix(",")
          next if ["[", "]", ""].include?(text)

          event = parse(text)
          event ? yield(event) : @damaged += 1
        end
      rescue SystemCallError => e
        raise Unreadable, e.message
      end

      # @param kind [String] one of KINDS, or "communication"
      # @return [Intervals] in microseconds
      def times(kind)
        @times.fetch(kind) { Intervals.new }
      end

      # Communication while backward had other things to do than to wait for it.
      def hidden
        times("communication") & (times("backward") - times("wait"))
      end

      # How long it lasted, in microseconds.
      def length
        @first ? @last - @first : 0
      end

      private

      def parse(text)
        event = JSON.parse(text)
        event if event.is_a?(Hash) && event["ph"].is_a?(String)
      rescue JSON::ParserError
        nil
      end

      def take(event)
        case event["ph"]
        when "M" then take_heading(event["args"]) if event["name"] == "tddp"
        when "X" then take_span(event)
        end
      end

      def take_heading(args)
        return unless args.is_a?(Hash) && args["rank"].is_a?(Integer) && args["wall_offset_ns"].is_a?(Integer)

        @rank, @host, @wall_offset_ns = args.values_at("rank", "host", "wall_offset_ns")
      end

      def take_span(event)
        start, lasted, lane = event.values_at("ts", "dur", "cat")
        return unless start.is_a?(Numeric) && lasted.is_a?(Numeric)

        finish = start + lasted
        @first = start if @first.nil? || start < @first
        @last = finish if @last.nil? || finish > @last
        if lane == "communication"
          @times[lane].add(start, finish)
        elsif lane == "training" && KINDS.include?(event["name"])
          @times[event["name"]].add(start, finish)
        end
      end
    end
  end
end
