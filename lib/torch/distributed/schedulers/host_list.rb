# frozen_string_literal: true

module Torch
  module Distributed
    module Schedulers
      # Slurm's short forms: of host names, `node[01-03,07],gpu1`, and of numbers per host, `2(x3),1`.
      #
      # @api private
      module HostList
        # More hosts than any cluster has: a list that says so is a mistake, and not worth the memory.
        LIMIT = 1 << 20

        module_function

        # @param text [String] names with commas between them; brackets hold numbers and ranges, several in a name
        #   stand for all combinations. A number's leading zeros are kept.
        # @return [Array<String>]
        # @raise [ArgumentError] naming the text
        def expand(text)
          names(text).flat_map { |name| combinations(name, text) }.tap do |hosts|
            raise ArgumentError, "host list #{text.inspect}: expected at most #{LIMIT} hosts" if hosts.size > LIMIT
          end
        end

        # @param text [String] `2(x3),1` for instance
        # @return [Array<Integer>] [2, 2, 2, 1]
        # @raise [ArgumentError] naming the text
        def counts(text)
          parts(text).flat_map do |part|
            match = /\A(\d+)(?:\(x(\d+)\))?\z/.match(part)
            times = match && Integer(match[2] || "1", 10)
            raise ArgumentError, "#{text.inspect}: expected numbers such as 2(x3),1" unless times&.between?(1, LIMIT)

            [Integer(match[1], 10)] * times
          end
        end

        # The commas within brackets belong to a name.
        def names(text)
          found = text.scan(/((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|\z)/).flatten
          return found if !found.empty? && found.join(",") == text

          raise ArgumentError, "host list #{text.inspect}: expected names such as node[01-03,07],gpu1"
        end

        def combinations(name, text)
          name.split(/(\[[^\]]*\])/).reject(&:empty?).inject([""]) do |heads, part|
            tails = part.start_with?("[") ? numbers(part[1..-2], text) : [part]
            raise ArgumentError, "host list #{text.inspect}: expected at most #{LIMIT} hosts" if heads.size * tails.size > LIMIT

            heads.product(tails).map(&:join)
          end
        end

        def numbers(list, text)
          parts(list).flat_map do |part|
            first, last = /\A(\d+)(?:-(\d+))?\z/.match(part)&.captures
            size = first && Integer(last || first, 10) - Integer(first, 10) + 1
            unless size&.between?(1, LIMIT)
              raise ArgumentError, "host list #{text.inspect}: expected numbers and rising ranges in brackets, got [#{list}]"
            end

            size.times.map { |i| (Integer(first, 10) + i).to_s.rjust(first.size, "0") }
          end
        end

        # Nothing is one empty part.
        def parts(list)
          list.empty? ? [""] : list.split(",", -1)
        end

        private_class_method :names, :combinations, :numbers, :parts
      end
    end
  end
end
