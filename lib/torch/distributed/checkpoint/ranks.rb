# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # Steps of all ranks together: each does its part, then all exchange the outcome. So an error of one is an error
      # of all, and no rank waits for one that has failed.
      #
      # @api private
      class Together
        # How a rank's part went: a value that JSON can say, or the exception's text.
        Outcome = Struct.new(:value, :error)

        # @return [Integer]
        attr_reader :rank, :size

        # @param group [ProcessGroup, nil] nil: this process is alone
        # @param operation [String] "save" or "load": all ranks must do the same
        def initialize(group, operation)
          @group = group
          @operation = operation
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

          said = Distributed.all_gather_object([@operation, *own], group: @group, serializer: :json)
          check(said.map(&:first))
          [said.map { |_, *outcome| Outcome.new(*outcome) }, error]
        end

        # All ranks must be given the same.
        #
        # @param doing [String] for the error's text
        # @param settings [Hash{String => Object}] what JSON can say
        # @raise [MismatchError] naming what differs, and two ranks
        def agree(doing, settings)
          said = all(doing) { settings }
          settings.each_key do |name|
            values = said.map { |each| each[name] }
            rank = values.index { |value| value != values.first } || next
            raise MismatchError, "#{doing}: #{name} is #{values.first.inspect} on rank 0, but #{values[rank].inspect} on rank #{rank}: " \
              "expected the same on all ranks"
          end
        end

        private

        def check(operations)
          rank = operations.index { |operation| operation != operations.first } || return

          raise MismatchError, "rank 0 is in Checkpoint.#{operations.first}, rank #{rank} in Checkpoint.#{operations[rank]}: all ranks must make " \
            "the same calls in the same order"
        end

        def text_of(error)
          text = error.message.dup.force_encoding(Encoding::UTF_8).scrub
          error.is_a?(Error) ? text : "#{text} (#{error.class.name})"
        end
      end
    end
  end
end
