# frozen_string_literal: true

module Torch
  module Distributed
    # How much is checked and logged: `TORCH_DISTRIBUTED_DEBUG`, OFF, INFO or DETAIL.
    #
    # With DETAIL the ranks compare, with each operation, the dtype and shape of what must be equal on all of them, so
    # that two tensors of as many elements but another shape are a {MismatchError} that shows both. What may
    # differ from rank to rank (the pieces of gather, scatter and all_to_all, messages) is not compared. A model wrapped
    # while it is on has the names of its parameters compared with each bucket of gradients.
    module Debug
      # The levels, from least to most.
      LEVELS = %i[off info detail].freeze

      # The variable that {#set_debug_level_from_env} reads.
      VARIABLE = "TORCH_DISTRIBUTED_DEBUG"

      # @return [Symbol] :off, :info or :detail
      attr_reader :debug_level
      alias_method :get_debug_level, :debug_level

      # @param level [Symbol, String] :off, :info or :detail
      # @return [Symbol]
      def set_debug_level(level)
        change_debug_level(level, "level")
      end

      # Takes the level from TORCH_DISTRIBUTED_DEBUG, which is done when the library is loaded too; without it :off.
      #
      # @return [Symbol]
      # @raise [ArgumentError] naming a value that is no level
      def set_debug_level_from_env
        value = ENV[VARIABLE]
        change_debug_level(value.to_s.empty? ? :off : value, VARIABLE)
      end

      private

      def change_debug_level(value, name)
        level = value.to_s.downcase.to_sym if value.is_a?(Symbol) || value.is_a?(String)
        unless LEVELS.include?(level)
          raise ArgumentError, "#{name}: expected #{LEVELS[0..-2].map(&:upcase).join(", ")} or #{LEVELS.last.upcase}, got #{value.inspect}"
        end

        self._detail = level == :detail
        @debug_level = level
      end
    end
  end
end
