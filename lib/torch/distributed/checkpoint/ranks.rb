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
      # All records of a meeting are one value in the store. What is too long for that, a rank puts there under keys of its
      # own, of which its record is the number, until all have read it: in such a step the ranks meet a second time.
      #
      # @api private
      class TogetherInStore < Together
        # Bytes: of the records of all ranks of one meeting; of a value.
        MOST_TOGETHER = 4 << 20
        MOST_AT_ONCE = 4 << 20
        private_constant :MOST_TOGETHER, :MOST_AT_ONCE

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
          own = []
          records = meet(@step.to_s) { record_of(Codec.dump(value), own) }
          said = records unless records.any? { |record| stored?(record) }
          unless said
            meet("#{@step}/read") do
              said = records.each_with_index.map { |record, rank| stored?(record) ? fetch(rank, Integer(record)) : record }
              ""
            end
          end
          @step += 1
          said.map { |text| Codec.load(text) }
        ensure
          delete(own)
        end

        # Meets the others, with the block's record. If this rank cannot, it reports why to those that wait.
        #
        # @return [Array<String>] the records by rank
        def meet(name)
          meeting = open_meeting(name)
          meeting.give(yield)
          await(meeting)
          records = meeting.records
        ensure
          if meeting
            report(meeting, TorchDDP::PassingError.current) unless records
            leave(meeting)
            meeting.close
          end
        end

        # @param own [Array<String>] to which the keys are added under which it is stored
        def record_of(text, own)
          return text if text.bytesize <= MOST_TOGETHER / @size

          parts = (text.bytesize + MOST_AT_ONCE - 1) / MOST_AT_ONCE
          parts.times do |part|
            own << part_key(@rank, part)
            @store.set(own.last, text.byteslice(part * MOST_AT_ONCE, MOST_AT_ONCE))
          end
          parts.to_s
        end

        # Others' records are Arrays in JSON.
        def stored?(record)
          !record.start_with?("[")
        end

        def part_key(rank, part)
          "#{@step}/record/#{rank}/#{part}"
        end

        # A rank that has failed meanwhile has deleted its own.
        def fetch(rank, parts)
          keys = Array.new(parts) { |part| part_key(rank, part) }
          raise CheckpointError, "async_save: rank #{rank} has failed before all had read its record" unless @store.check(keys)

          keys.map { |key| @store.get(key) }.join
        end

        # The others know of a rank that is lost.
        def report(meeting, error)
          return if error.is_a?(PeerLostError)

          meeting.fail(TorchDDP.printable(error ? text_of(error) : "it was interrupted"))
        rescue Error
          nil
        end

        # The store may be lost, with which they end.
        def delete(keys)
          keys.each { |key| @store.delete_key(key) }
        rescue Error
          nil
        end

        def await(meeting)
          meeting.await(@timeout)
        rescue TimeoutError
          raise TimeoutError, "async_save: waited #{@timeout} s in vain for rank(s) #{meeting.missing.first(8).join(", ")} of #{@size}", cause: nil
        rescue PeerLostError => e
          raise PeerLostError, "async_save: #{e.message}", cause: nil
        end

        def open_meeting(name)
          Meeting.new(@store, name, @rank, @size, @group, Array.new(@size) { |rank| rank })
        rescue GroupError
          # The group was destroyed: the store is what is left.
          Meeting.new(@store, name, @rank, @size)
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
