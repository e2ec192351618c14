# frozen_string_literal: true

module Torch
  module Distributed
    class MemoryEstimate
      # Measures what code does to the bytes of tensors.
      #
      # @api private
      module Measured
        class << self
          # @return [Integer] bytes that the block's value and what that refers to have
          def held(device = nil)
            between_collections do
              before = current(device)
              value = yield
              collect
              [current(device) - before, value].first
            end
          end

          # @return [Integer] bytes that there are more at once, while the block runs and nothing is collected
          def peak(device = nil)
            between_collections do
              Distributed.reset_peak_memory_stats(device)
              before = current(device)
              yield
              Distributed.memory_stats(device)[:peak_bytes] - before
            end
          end

          # @return [Integer]
          def current(device = nil)
            Distributed.memory_stats(device)[:current_bytes]
          end

          # Twice, because the first collection may see what is still on the stack.
          def collect
            2.times { GC.start }
          end

          private

          def between_collections
            enabled = !GC.disable
            collect
            yield
          ensure
            GC.enable if enabled
          end
        end
      end
      private_constant :Measured
    end
  end
end
