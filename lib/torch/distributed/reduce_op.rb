# frozen_string_literal: true

module Torch
  module Distributed
    # How values of several ranks are combined; the numbers are PyTorch's. Wherever an operation is expected,
    # the constant, its name as a symbol or string (:sum, "avg") and {.premul_sum} are taken.
    module ReduceOp
      # A sum of values each multiplied by a factor first.
      PremulSum = Struct.new(:factor)

      # Other names that PyTorch and habit give to operations.
      ALIASES = {"prod" => "PRODUCT", "mean" => "AVG", "average" => "AVG"}.freeze

      # The constants' numbers by their names, and what {.resolve} answers for those that need no factor.
      NUMBERS = constants.to_h { |name| [name.to_s, const_get(name)] }.select { |_, number| number.is_a?(Integer) }.freeze
      PLAIN = (NUMBERS.values - [PREMUL_SUM]).to_h { |number| [number, [number, 0.0].freeze] }.freeze
      private_constant :ALIASES, :NUMBERS, :PLAIN

      class << self
        # @param factor [Numeric] what this rank's values are multiplied by before they are added; it may differ between
        #   ranks, for a weighted sum
        # @return [PremulSum] for the `op:` of a reduction
        def premul_sum(factor)
          raise TypeError, "factor: expected a number, got #{factor.inspect}" unless factor.is_a?(Numeric)

          PremulSum.new(factor.to_f).freeze
        end

        # @api private
        # @return [Array(Integer, Float)] the operation's number and the factor of PREMUL_SUM
        def resolve(op)
          PLAIN[op] || PLAIN[number_of(op)] || with_factor(op)
        end

        private

        def number_of(op)
          NUMBERS[ALIASES.fetch(op.to_s.downcase, op.to_s.upcase)] if op.is_a?(Symbol) || op.is_a?(String)
        end

        def with_factor(op)
          return [PREMUL_SUM, op.factor] if op.is_a?(PremulSum)
          raise ArgumentError, "op: PREMUL_SUM needs its factor: ReduceOp.premul_sum(0.5)" if [op, number_of(op)].include?(PREMUL_SUM)

          raise ArgumentError, "op: expected one of #{NUMBERS.sort_by(&:last).map { |name, _| ":#{name.downcase}" }.join(", ")} " \
            "or a constant of ReduceOp, got #{op.inspect}"
        end
      end
    end
  end
end
