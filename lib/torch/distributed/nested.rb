# frozen_string_literal: true

module Torch
  module Distributed
    # Tensors within Arrays, Hashes, Structs, Data objects and what these hold, to any depth.
    #
    # @api private
    module Nested
      # Data came with Ruby 3.2.
      RECORD = (defined?(::Data) && ::Data.respond_to?(:define)) ? ::Data : nil
      private_constant :RECORD

      class << self
        # @param value [Object]
        # @return [Array<Torch::Tensor>] all tensors in it, in the order in which {.map} comes to them
        def tensors(value)
          found = []
          map(value) { |tensor| found << tensor && tensor }
          found
        end

        # Rebuilds `value` with other tensors. What holds none that changed stays the object that it is, and nothing is
        # changed in place. An object that holds itself is left as it is.
        #
        # @param value [Object]
        # @yieldparam tensor [Torch::Tensor]
        # @yieldreturn [Object] what takes its place
        def map(value, &block)
          return yield(value) if value.is_a?(Torch::Tensor)

          container?(value) ? rebuild(value, {}.compare_by_identity, &block) : value
        end

        # @return [Boolean] whether {.map} looks into it
        def container?(value)
          case value
          when Array, Hash, Struct then true
          else record?(value)
          end
        end

        # @return [Hash] what a container holds, by its place: a number, or a member's name
        def parts_of(value)
          case value
          when Array then value.each_with_index.to_h { |part, index| [index, part] }
          when Hash then value.to_a.each_with_index.to_h { |(_, part), index| [index, part] }
          else value.to_h
          end
        end

        # @param changed [Hash] other parts, by their places
        # @return [Object] the same container but for these
        def with(value, changed)
          return value.with(**changed) if record?(value)

          copy = value.dup
          keys = value.keys if value.is_a?(Hash)
          changed.each { |key, part| copy[keys ? keys[key] : key] = part }
          value.frozen? ? copy.freeze : copy
        end

        private

        # `seen` has the objects that are being rebuilt, and those that are: one object stays one.
        def rebuild(value, seen, &block)
          return yield(value) if value.is_a?(Torch::Tensor)
          return value unless container?(value)
          return seen[value] if seen.key?(value)

          seen[value] = value
          parts = parts_of(value)
          changed = parts.to_h { |key, part| [key, rebuild(part, seen, &block)] }
          changed.reject! { |key, part| part.equal?(parts[key]) }
          seen[value] = changed.empty? ? value : with(value, changed)
        end

        def record?(value)
          RECORD ? value.is_a?(RECORD) : false
        end
      end
    end
  end
end
