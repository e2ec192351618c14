# frozen_string_literal: true

module Torch
  module Distributed
    module Pipelining
      # What a rank does at once: `:F` the forward of a micro-batch through a stage, `:B` its backward; where backward is split,
      # `:I` computes the gradients of inputs and `:W` those of weights. Written as "2F0": stage, kind, micro-batch.
      Action = Struct.new(:stage, :kind, :micro_batch) do
        # @param text [String] "2F0"
        # @return [Action]
        # @raise [ArgumentError]
        def self.parse(text)
          stage, kind, micro_batch = text.to_s.match(/\A(\d+)([FBIW])(\d+)\z/)&.captures
          unless stage
            raise ArgumentError, "action: expected a text like \"2F0\" of a stage, one of F, B, I, W and a micro-batch, got #{text.inspect}"
          end

          new(stage.to_i, kind.to_sym, micro_batch.to_i)
        end

        # @return [Boolean] whether the gradients of the stage's inputs come of it
        def backward?
          kind == :B || kind == :I
        end

        # @return [String] "2F0"
        def to_s
          "#{stage}#{kind}#{micro_batch}"
        end
        alias_method :inspect, :to_s
      end
    end
  end
end
