# frozen_string_literal: true

module Torch
  module Utils
    module Data
      # How far the program is in an epoch of a sampler or a loader, over which several loops may run at once.
      #
      # The position is that of the outermost loop: a loop that begins within another one, as `first` does that is called in the
      # block of `each`, does not move it. An Enumerator whose `next` is called runs on a fiber of its own, within no loop: of such loops
      # the one that was given something last counts, and when a loop is left, an Enumerator counts again that is further.
      #
      # @api private
      class Progress
        # Where the key of {#within} lies: Ruby's thread locals are those of a fiber.
        KEY = :torch_ddp_loops
        private_constant :KEY

        # The number of the current epoch, and how often the program has set it.
        class Epoch
          # @return [Integer]
          attr_reader :number, :calls

          def initialize
            @number = 0
            @calls = 0
          end

          # @param number [Integer] what the program says
          def set(number)
            @calls += 1
            @number = number
          end

          # @param number [Integer] what a state says
          def restore(number)
            @number = number
          end
        end

        # A position: how much of an epoch's order was handed out, and whether a loop over it has reached its end.
        Place = Struct.new(:epoch, :at, :finished)

        # One loop, as long as it runs.
        class Loop
          # @return [Integer] how many states had been loaded when it began
          attr_reader :generation

          # @return [Boolean] whether it is within no other loop
          attr_reader :outermost

          # @return [Loop, nil] whose position counted before
          attr_accessor :interrupted

          # @return [Integer]
          attr_reader :at

          # @return [Boolean] whether its position counts now, whether it goes on, and whether it has reached its end
          attr_accessor :counts, :open, :finished

          def initialize(progress, epoch, at, outermost, generation)
            @progress = progress
            @epoch = epoch
            @at = at
            @outermost = outermost
            @generation = generation
            @open = true
            @counts = @finished = false
          end

          # @return [Place]
          def place
            Place.new(@epoch, @at, @finished)
          end

          # @param count [Integer] how much is handed out now
          def advance(count)
            @at += count
            @progress.count(self) unless @counts
          end

          # @return [Boolean] whether its position says something of an epoch, after so many states were loaded
          def valid?(epoch, generation)
            @outermost && @epoch == epoch && @generation == generation
          end
        end

        # @param epoch [Epoch]
        def initialize(epoch)
          @epoch = epoch
          @generation = 0
          @loop = nil
          @loaded = nil
          @resume = nil
          @owner = nil
        end

        # @return [Place] what a state says now
        def place
          own = within[self]
          own = @loop unless own&.generation == @generation
          found = own ? own.place : @loaded
          (found&.epoch == @epoch.number) ? found : Place.new(@epoch.number, 0, false)
        end

        # Goes to a position; loops that are running do not count any more.
        #
        # @param place [Place]
        # @param owner [Object, nil] whose loop begins there; nil: the next one
        def load(place, owner = nil)
          @epoch.restore(place.epoch)
          @calls = @epoch.calls
          @generation += 1
          make_current(nil)
          @loaded = @resume = place
          @owner = owner
        end

        # A finished epoch is over: the next loop runs through the next one, unless the program has set the same epoch since.
        #
        # @param by [Object, nil] whose loop it is
        # @return [Place, nil] where the next loop begins; nil: at the beginning
        def resume(by = nil)
          place = @resume unless by && @owner && !@owner.equal?(by)
          place if place&.epoch == @epoch.number && !(place.finished && @epoch.calls == @calls)
        end

        # Runs the block as a loop, which has reached its end when the block returns.
        #
        # @param from [Place, nil] where it begins; nil: at the beginning
        # @yieldparam loop [Loop]
        def run(from)
          @resume = nil
          loops = within
          outermost = !loops.key?(self)
          running = Loop.new(self, @epoch.number, from ? from.at : 0, outermost, @generation)
          loops[self] = running if outermost
          result = yield running
          running.finished = true
          result
        ensure
          if outermost
            loops.delete(self)
            leave(running)
          end
        end

        # Makes a loop the one whose position counts.
        #
        # @param loop [Loop]
        def count(loop)
          return if @loop.equal?(loop) || !loop.valid?(@epoch.number, @generation)

          loop.interrupted = @loop if @loop&.open
          @loop&.interrupted = nil
          make_current(loop)
        end

        private

        # @return [Hash{Progress => Loop}] the outermost loops of this fiber
        def within
          Thread.current[KEY] ||= {}.compare_by_identity
        end

        def make_current(loop)
          @loop&.counts = false
          @loop = loop
          loop&.counts = true
        end

        def leave(loop)
          loop.open = false
          count(loop)
          before = loop.interrupted
          loop.interrupted = nil
          return unless @loop.equal?(loop) && !loop.finished && before&.open && before.valid?(@epoch.number, @generation)

          make_current(before) if before.at > loop.at
        end
      end
      private_constant :Progress
    end
  end
end
