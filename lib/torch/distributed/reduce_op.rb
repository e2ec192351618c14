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
      private_constant :ALIASES

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
          return [PREMUL_SUM, op.factor] if op.is_a?(PremulSum)

          number = op.is_a?(Integer) ? op : number_of(op)
          unless number&.between?(SUM, PREMUL_SUM)
            raise ArgumentError, "op: expected one of #{names.map { |name| ":#{name.downcase}" }.join(", ")} " \
              "or a constant of ReduceOp, got #{op.inspect}"
          end
          raise ArgumentError, "op: PREMUL_SUM needs its factor: ReduceOp.premul_sum(0.5)" if number == PREMUL_SUM

          [number, 0.0]
        end

        private

        def names
          constants.select { |name| const_get(name).is_a?(Integer) }.sort_by { |name| const_get(name) }
        end

        def number_of(op)
          return unless op.is_a?(Symbol) || op.is_a?(String)

          name = ALIASES.fetch(op.to_s.downcase, op.to_s.upcase)
          const_get(name) if names.include?(name.to_sym)
        end
      end
    end
  end
end
