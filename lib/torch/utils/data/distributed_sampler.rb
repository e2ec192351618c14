# frozen_string_literal: true

require "torch"

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
        attr_reader :seed, :epoch

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
          @epoch = 0
          @position = 0
          @resume_at = nil
          @total_size = end_from(0)
          @num_samples = share(0)
        end

        # Chooses the order of an epoch; without it every epoch has the same. Another epoch than the one of which a part
        # was loaded with {#load_state_dict} begins at its start.
        #
        # @param epoch [Integer] the same on every process
        def set_epoch(epoch) # standard:disable Naming/AccessorMethodName
          return if epoch == @epoch

          @epoch = epoch
          @position = 0
          @resume_at = nil
        end
        alias_method :epoch=, :set_epoch

        # The first time after {#load_state_dict} what was left of that epoch, else all of this process's part.
        #
        # @yieldparam index [Integer]
        # @return [Enumerator, self]
        def each
          return enum_for(:each) { remaining } unless block_given?

          begin_pass.each do |index|
            advance(1)
            yield index
          end
          self
        end

        # What {#each} yields next, for callers that iterate themselves: they report it to {#advance}.
        #
        # @return [Array<Integer>]
        def begin_pass
          start = @resume_at || 0
          @resume_at = nil
          @position = start
          order = whole_order
          (start + @rank).step(end_from(start) - 1, @num_replicas).map { |place| order[place % order.size] }
        end

        # Counts indices as handed out, here and on the other processes.
        #
        # @param count [Integer] how many of {#begin_pass}
        def advance(count)
          @position += count * @num_replicas
        end

        # @return [Integer] how many indices this process gets in an epoch
        def size
          @num_samples
        end
        alias_method :length, :size

        # @return [Integer] how many {#each} would yield now: less than {#size} only after {#load_state_dict}
        def remaining
          share(@resume_at || 0)
        end

        # Where this sampler is, the same on every process when each has handed out as many indices. Save it after a
        # batch was trained on.
        #
        # @return [Hash{String => Object}]
        def state_dict
          {"epoch" => @epoch, "position" => [@position, end_from(0)].min, "seed" => @seed, "shuffle" => @shuffle,
           "dataset_size" => @dataset_size}
        end

        # Goes on where {#state_dict} was: what no process had handed out then is shared anew, among however many there
        # are now. With as many as then, each goes on with its own part.
        #
        # @param state [Hash{String => Object}]
        # @return [self]
        # @raise [ArgumentError] if it is the state of another order
        def load_state_dict(state)
          epoch, position = check_state(state)
          @epoch = epoch
          @position = @resume_at = position
          self
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

        # All indices as this epoch orders them; the program's own random numbers are left alone.
        def whole_order
          return (0...@dataset_size).to_a unless @shuffle

          generator = Torch::Generator.new
          generator.manual_seed(@seed + @epoch)
          Torch.randperm(@dataset_size, generator: generator).to_a
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
