# frozen_string_literal: true

module TorchDDP
  module Trace
    # Stretches of time, as [start, end]: their sum without counting any moment twice, and what two sets share.
    class Intervals
      def initialize(list = [])
        @list = list
      end

      def add(start, finish)
        @merged = nil
        @list << [start, finish]
      end

      def empty?
        @list.empty?
      end

      # @return [Array<Array>] apart from each other, in order
      def merged
        @merged ||= @list.sort.each_with_object([]) do |(start, finish), apart|
          if apart.any? && start <= apart.last[1]
            apart.last[1] = finish if finish > apart.last[1]
          else
            apart << [start, finish]
          end
        end
      end

      def sum
        merged.sum { |start, finish| finish - start }
      end

      def &(other)
        mine = merged
        theirs = other.merged
        shared = []
        i = j = 0
        while i < mine.size && j < theirs.size
          start = [mine[i][0], theirs[j][0]].max
          finish = [mine[i][1], theirs[j][1]].min
          shared << [start, finish] if start < finish
          (mine[i][1] < theirs[j][1]) ? i += 1 : j += 1
        end
        Intervals.new(shared)
      end

      def -(other)
        edges = [-Float::INFINITY, *other.merged.flatten, Float::INFINITY]
        self & Intervals.new(edges.each_slice(2).to_a)
      end
    end
  end
end
