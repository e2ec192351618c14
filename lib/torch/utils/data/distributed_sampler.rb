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
      class DistributedSampler
        include Enumerable

        # @return [Integer] how many processes share the data
        attr_reader :num_replicas

        # @return [Integer] this process's number among them
        attr_reader :rank

        # @return [Integer]
        attr_reader :seed, :epoch

        # @return [Integer] how many indices each process gets
        attr_reader :num_samples

        # @return [Integer] how many all get together
        attr_reader :total_size

        # @param dataset [#size, #length, Integer] what is shared, or how much
        # @param num_replicas [Integer, nil] nil: the world size
        # @param rank [Integer, nil] nil: this process's rank
        # @param shuffle [Boolean] whether the order changes by epoch
        # @param seed [Integer] the same on every process
        # @param drop_last [Boolean] whether to leave out what cannot be shared evenly, rather than give some twice
        def initialize(dataset, num_replicas: nil, rank: nil, shuffle: true, seed: 0, drop_last: false)
          @dataset_size = size_of(dataset)
          @num_replicas = num_replicas || Torch::Distributed.get_world_size
          @rank = rank || Torch::Distributed.get_rank
          unless @num_replicas.is_a?(Integer) && @num_replicas.positive?
            raise ArgumentError, "num_replicas: expected 1 or more, got #{num_replicas.inspect}"
          end
          unless @rank.is_a?(Integer) && @rank.between?(0, @num_replicas - 1)
            raise ArgumentError, "rank: expected 0 to #{@num_replicas - 1} (num_replicas #{@num_replicas}), got #{@rank.inspect}"
          end

          @shuffle = shuffle
          @seed = seed
          @drop_last = drop_last
          @epoch = 0
          @num_samples = drop_last ? @dataset_size / @num_replicas : (@dataset_size + @num_replicas - 1) / @num_replicas
          @total_size = @num_samples * @num_replicas
        end

        # Chooses the order of an epoch; without it every epoch has the same.
        #
        # @param epoch [Integer] the same on every process
        def set_epoch(epoch) # standard:disable Naming/AccessorMethodName
          @epoch = epoch
        end
        alias_method :epoch=, :set_epoch

        # @yieldparam index [Integer]
        # @return [Enumerator, self]
        def each(&block)
          return enum_for(:each) { size } unless block

          order = whole_order
          @rank.step(@total_size - 1, @num_replicas) { |place| block.call(order[place % order.size]) }
          self
        end

        # @return [Integer] how many indices this process gets
        def size
          @num_samples
        end
        alias_method :length, :size

        private

        def size_of(dataset)
          return dataset if dataset.is_a?(Integer) && dataset >= 0
          return dataset.size if dataset.respond_to?(:size) && dataset.size.is_a?(Integer)
          return dataset.length if dataset.respond_to?(:length) && dataset.length.is_a?(Integer)

          raise TypeError, "dataset: expected something with a size, got #{dataset.inspect}"
        end

        # All indices as this epoch orders them; the program's own random numbers are left alone.
        def whole_order
          return (0...@dataset_size).to_a unless @shuffle

          generator = Torch::Generator.new
          generator.manual_seed(@seed + @epoch)
          Torch.randperm(@dataset_size, generator: generator).to_a
        end
      end
    end
  end
end
