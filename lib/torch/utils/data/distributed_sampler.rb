# frozen_string_literal: true

require "torch"
require_relative "index_share"
require_relative "progress"

module Torch
  module Utils
    module Data
      # The indices of one process's part of a data set. All parts are equally long: some indices come
      # twice, or with `drop_last` some not at all. The order is that of PyTorch's sampler with the same
      # arguments.
      #
      #   sampler = Torch::Utils::Data::DistributedSampler.new(dataset)
      #   epochs.times do |epoch|
      #     sampler.set_epoch(epoch)
      #     sampler.each_slice(64) { |indices| … }
      #   end
      #
      # To evaluate a model, `pad: false` gives every index to exactly one process. The parts then differ in length by
      # one, so that no operation of all processes may be made for each of them.
      #
      # Within an epoch, too, a run can be saved and go on later, also with another number of processes: see
      # {#state_dict}.
      class DistributedSampler
        include Enumerable

        # @return [Integer] how many processes share the data
        attr_reader :num_replicas

        # @return [Integer] this process's number among them
        attr_reader :rank

        # @return [Integer]
        attr_reader :seed

        # @return [Integer] how many indices this process gets in an epoch
        attr_reader :num_samples

        # @return [Integer] how many all get together
        attr_reader :total_size

        # @param dataset [#size, #length, Integer] what is shared, or how much
        # @param num_replicas [Integer, nil] nil: the world size
        # @param rank [Integer, nil] nil: this process's rank
        # @param shuffle [Boolean] whether the order changes by epoch
        # @param seed [Integer] the same on every process
        # @param drop_last [Boolean] whether to leave out what cannot be shared evenly, rather than give some twice
        # @param pad [Boolean] false: neither, the last processes get one less
        def initialize(dataset, num_replicas: nil, rank: nil, shuffle: true, seed: 0, drop_last: false, pad: true)
          @dataset_size = size_of(dataset)
          @num_replicas = num_replicas || Torch::Distributed.get_world_size
          @rank = rank || Torch::Distributed.get_rank
          check(drop_last, pad)
          @shuffle = shuffle
          @seed = seed
          @drop_last = drop_last
          @pad = pad
          @epoch = Progress::Epoch.new
          @progress = Progress.new(@epoch)
          @total_size = end_from(0)
          @num_samples = share(0)
        end

        # Chooses the order of an epoch; without it every epoch has the same. Another epoch than the one of which a part
        # was loaded with {#load_state_dict} begins at its start.
        #
        # @param epoch [Integer] the same on every process
        def set_epoch(epoch) # standard:disable Naming/AccessorMethodName
          @epoch.set(epoch)
        end
        alias_method :epoch=, :set_epoch

        # @return [Integer]
        def epoch
          @epoch.number
        end

        # The first time after {#load_state_dict} what was left of that epoch, else all of this process's part. A loop that begins
        # within another one over this sampler begins at the start and does not move the position of {#state_dict}.
        #
        # @yieldparam index [Integer]
        # @return [Enumerator, self]
        def each
          return enum_for(:each) { remaining } unless block_given?

          run do |share, running|
            share.each do |index|
              running.advance(@num_replicas)
              yield index
            end
          end
          self
        end

        # Runs the block as a loop over this sampler, for callers that hand the indices out themselves.
        #
        # @api private
        # @param from [Progress::Place, nil] where it begins; nil: at the beginning
        # @yieldparam share [IndexShare] the indices
        # @yieldparam running [Progress::Loop] to be advanced by `num_replicas` for each of them
        def run(from = @progress.resume)
          @progress.run(from) { |running| yield indices(from ? from.at : 0), running }
        end

        # For loaders, which go by this sampler's epochs and know positions of their own.
        #
        # @api private
        # @return [Array(Progress::Epoch, Progress)]
        def _progress
          [@epoch, @progress]
        end

        # @return [Integer] how many indices this process gets in an epoch
        def size
          @num_samples
        end
        alias_method :length, :size

        # @return [Integer] how many {#each} would yield now: less than {#size} only after {#load_state_dict}
        def remaining
          share(@progress.resume&.at || 0)
        end

        # Where this sampler is, the same on every process when each has handed out as many indices. Save it after a
        # batch was trained on, or after an epoch, which is `finished` then.
        #
        # @return [Hash{String => Object}]
        def state_dict
          state_at(@progress.place)
        end

        # Goes on where {#state_dict} was: what no process had handed out then is shared anew, among however many there
        # are now. With as many as then, each goes on with its own part. Where the epoch was finished, the next {#each} is a whole one;
        # if {#set_epoch} names that same epoch first, nothing is left of it.
        #
        # @param state [Hash{String => Object}]
        # @return [self]
        # @raise [ArgumentError] if it is the state of another order
        def load_state_dict(state)
          @progress.load(place_of(state))
          self
        end

        # @api private
        # @param place [Progress::Place]
        # @return [Hash{String => Object}] what {#state_dict} gives at that place
        def state_at(place)
          at = place.finished ? [end_from(0), @dataset_size].max : [place.at, end_from(0)].min
          {"epoch" => place.epoch, "position" => at, "finished" => place.finished, "seed" => @seed, "shuffle" => @shuffle,
           "dataset_size" => @dataset_size}
        end

        # @api private
        # @param state [Hash{String => Object}]
        # @return [Progress::Place]
        # @raise [ArgumentError] if it is the state of another order
        def place_of(state)
          epoch, position = check_state(state)
          Progress::Place.new(epoch, position, state["finished"] == true && position >= @dataset_size)
        end

        private

        def size_of(dataset)
          return dataset if dataset.is_a?(Integer) && dataset >= 0
          return dataset.size if dataset.respond_to?(:size) && dataset.size.is_a?(Integer)
          return dataset.length if dataset.respond_to?(:length) && dataset.length.is_a?(Integer)

          raise TypeError, "dataset: expected something with a size, got #{dataset.inspect}"
        end

        def check(drop_last, pad)
          unless @num_replicas.is_a?(Integer) && @num_replicas.positive?
            raise ArgumentError, "num_replicas: expected 1 or more, got #{@num_replicas.inspect}"
          end
          unless @rank.is_a?(Integer) && @rank.between?(0, @num_replicas - 1)
            raise ArgumentError, "rank: expected 0 to #{@num_replicas - 1} (num_replicas #{@num_replicas}), got #{@rank.inspect}"
          end
          raise ArgumentError, "drop_last: with pad: false nothing is given twice or left out: leave one of them" if drop_last && !pad
        end

        # The place in the order at which an epoch ends that begins, or goes on, at `start`.
        def end_from(start)
          left = [@dataset_size - start, 0].max
          return start + left unless @pad
          return start + left / @num_replicas * @num_replicas if @drop_last

          start + (left + @num_replicas - 1) / @num_replicas * @num_replicas
        end

        # How many places from `start` on are this process's.
        def share(start)
          [(end_from(start) - start - @rank + @num_replicas - 1) / @num_replicas, 0].max
        end

        # This process's part of what this epoch has from `start` on; the program's own random numbers are left alone.
        def indices(start)
          size = share(start)
          return IndexShare.new(@dataset_size, start + @rank, @num_replicas, size) unless @shuffle && size.positive?

          generator = Torch::Generator.new
          generator.manual_seed(@seed + epoch)
          IndexShare.new(Torch.randperm(@dataset_size, generator: generator), start + @rank, @num_replicas, size)
        end

        def check_state(state)
          raise ArgumentError, "state_dict: expected a Hash as state_dict gives it, got #{state.inspect}" unless state.is_a?(Hash)

          {"seed" => @seed, "shuffle" => @shuffle, "dataset_size" => @dataset_size}.each do |key, own|
            next if state[key] == own

            raise ArgumentError, "state_dict: #{key} is #{state[key].inspect}, here #{own.inspect}: it is the place in another order"
          end
          epoch, position = state.values_at("epoch", "position")
          return [epoch, position] if epoch.is_a?(Integer) && position.is_a?(Integer) && position >= 0

          raise ArgumentError, "state_dict: expected numbers as epoch and position, got #{epoch.inspect} and #{position.inspect}"
        end
      end
    end
  end
end
