# frozen_string_literal: true

require "json"

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

          said = exchange([@operation, *own])
          check(said.map(&:first))
          [said.map { |_, *outcome| Outcome.new(*outcome) }, error]
        end

        # @param label [String] the same on all ranks, and of these steps alone
        # @return [Together] of the same ranks, for a thread beside those that use the group
        def beside(label)
          (@size > 1) ? TogetherInStore.new(@group, @operation, label) : Together.new(nil, @operation)
        end

        # Releases what it needed; no step follows.
        def finish
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

        # JSON that is nested as deep as a manifest's may be.
        module Codec
          def self.dump(value)
            JSON.generate(value, max_nesting: Manifest::NESTING)
          end

          def self.load(text)
            JSON.parse(text.force_encoding(Encoding::UTF_8), max_nesting: Manifest::NESTING)
          end
        end
        private_constant :Codec

        # @return [Array] every rank's value
        def exchange(value)
          Distributed.all_gather_object(value, group: @group, serializer: Codec)
        end

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

      # Steps of all ranks, which meet in the group's store: the group's operations are the program's.
      #
      # @api private
      class TogetherInStore < Together
        def initialize(group, operation, label)
          super(group, operation)
          @timeout = group.timeout
          shared = group._store
          @connection = shared._clone
          shared.close
          @store = PrefixStore.new("checkpoint/#{label}", @connection)
          @step = 0
        end

        def finish
          [@store, @connection].each(&:close)
        end

        private

        def exchange(value)
          meeting = open_meeting
          meeting.give(Codec.dump(value))
          await(meeting)
          said = meeting.records.map { |text| Codec.load(text) }
          leave(meeting)
          @step += 1
          said
        ensure
          meeting&.close
        end

        def await(meeting)
          meeting.await(@timeout)
        rescue TimeoutError
          raise TimeoutError, "async_save: waited #{@timeout} s in vain for rank(s) #{meeting.missing.first(8).join(", ")} of #{@size}", cause: nil
        rescue PeerLostError => e
          raise PeerLostError, "async_save: #{e.message}", cause: nil
        end

        def open_meeting
          Meeting.new(@store, @step.to_s, @rank, @size, @group, Array.new(@size) { |rank| rank })
        rescue GroupError
          # The group was destroyed: the store is what is left.
          Meeting.new(@store, @step.to_s, @rank, @size)
        end

        # The rank that hosts the store may have ended after the last step.
        def leave(meeting)
          meeting.leave
        rescue Error
          nil
        end
      end
    end
  end
end
