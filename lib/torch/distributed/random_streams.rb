# frozen_string_literal: true

module Torch
  module Distributed
    # Random numbers beside libtorch's own on the CPU: a stream for each of some groups, in whose place they are within a block.
    #
    # @api private
    module RandomStreams
      @states = {}
      @current = nil

      class << self
        # @return [void]
        def seed(group, seed)
          add(group, Distributed.fork_rng { seeded(seed) })
        end

        # @param offset [Integer] if the stream has no seed yet: how much more it is than a number that libtorch's state determines
        # @return [Object] the block's value
        def within(group, offset)
          return yield if @current == group

          add(group, first_state(offset)) unless @states[group]
          outer, before = Distributed.send(:_rng_state), @current
          Distributed.send(:_set_rng_state, @states[group])
          @current = group
          begin
            yield
          ensure
            @states[group] = Distributed.send(:_rng_state)
            Distributed.send(:_set_rng_state, outer)
            @current = before
          end
        end

        # For a block that is to draw the same numbers again.
        #
        # @return [Proc] runs a block with the streams as they are now, and leaves them as it found them
        def snapshot
          states, current = @states.dup, @current
          lambda do |&block|
            before = [@states, @current]
            @states, @current = states.dup, current
            begin
              block.call
            ensure
              @states, @current = before
            end
          end
        end

        private

        def add(group, state)
          @states.delete_if { |each, _| each.closed? }
          @states[group] = state
        end

        def seeded(seed)
          Torch.manual_seed(seed)
          Distributed.send(:_rng_state)
        end

        # Torch.manual_seed also seeds GPUs, where all processes have to go on with the same.
        def first_state(offset)
          Distributed.fork_rng do
            base = Torch.randint(1 << 31, [1], dtype: :int64).item
            seeded(base + offset).tap { Torch.manual_seed(base) }
          end
        end
      end
    end
  end
end
