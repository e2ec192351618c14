# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # What all ranks do together: each does its part, then all learn how it went everywhere. So an error of one is an error
      # of all, and nobody waits for a rank that has given up.
      #
      # @api private
      class Together
        # How a rank's part went: a value that JSON can say, or the exception's text.
        Outcome = Struct.new(:value, :error)

        # @return [Integer]
        attr_reader :rank, :size

        # @param group [ProcessGroup, nil] nil: this process is alone
        def initialize(group)
          @group = group
          @rank = group ? group.rank : 0
          @size = group ? group.size : 1
        end

        # @param doing [String] for the error's text: "cannot save DIR"
        # @return [Array] the block's values by rank
        # @raise [CheckpointError] naming the rank on which it failed
        def all(doing, &block)
          outcomes, own = outcomes(&block)
          bad = outcomes.each_index.select { |rank| outcomes[rank].error }
          return outcomes.map(&:value) if bad.empty?

          shown = bad.first(3).map { |rank| (@size > 1) ? "rank #{rank}: #{outcomes[rank].error}" : outcomes[rank].error }
          shown << "and #{bad.size - 3} ranks more" if bad.size > 3
          raise CheckpointError, "#{doing}: #{shown.join("; ")}", cause: own
        end

        # Runs the block on rank 0 only.
        #
        # @return [Object] its value, on all ranks
        def on_first(doing)
          all(doing) { yield if @rank.zero? }.first
        end

        # @return [Array(Array<Outcome>, StandardError)] by rank, and what was raised here
        def outcomes
          error = nil
          value = begin
            yield
          rescue => e
            error = e
            nil
          end
          own = [value, error && text_of(error)]
          return [[Outcome.new(*own)], error] unless @group

          [Distributed.all_gather_object(own, group: @group, serializer: :json).map { |said| Outcome.new(*said) }, error]
        end

        private

        def text_of(error)
          text = error.message.dup.force_encoding(Encoding::UTF_8).scrub
          error.is_a?(Error) ? text : "#{text} (#{error.class.name})"
        end
      end
    end
  end
end
