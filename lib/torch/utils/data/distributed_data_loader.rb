# frozen_string_literal: true

require "torch"
require_relative "distributed_sampler"
require_relative "batch_fetcher"
require_relative "prefetcher"
require_relative "progress"

module Torch
  module Utils
    module Data
      # torch-rb's DataLoader for this process's part of a data set, read ahead in the background where that is asked for.
      #
      #   loader = Torch::Utils::Data::DistributedDataLoader.new(dataset, batch_size: 64, shuffle: true, num_workers: 1, device: ctx.device)
      #   epochs.times do |epoch|
      #     loader.set_epoch(epoch)
      #     loader.each { |images, labels| … }
      #   end
      #
      # It is Enumerable: `loader.first`, `loader.each_with_index`, `loader.lazy.map { … }.first(10)`. However a loop over it is
      # left, the workers end with it.
      #
      # The order is the sampler's whatever the number of workers. Workers are threads: they read files or wait for a
      # network beside training, but what they compute in Ruby takes turns with it.
      class DistributedDataLoader < DataLoader
        # @return [Integer, nil] nil with a batch_sampler
        attr_reader :batch_size

        # @return [#each] of indices; nil with a batch_sampler
        attr_reader :sampler

        # @return [#each] of arrays of indices, or nil
        attr_reader :batch_sampler

        # @param dataset [#[]] also with `size`, where no sampler is given. Of a TensorDataset, and of a Dataset that has
        #   `fetch(indices)` for a whole batch, batches are taken at once, unless there is a collate_fn.
        # @param batch_size [Integer]
        # @param shuffle [Boolean] whether the order changes by epoch
        # @param sampler [#each, nil] which indices, in which order; nil: a {DistributedSampler} over the default group,
        #   or of everything where there is no group
        # @param batch_sampler [#each, nil] the indices of each batch, instead of batch_size, shuffle, sampler and drop_last
        # @param collate_fn [#call, nil] makes a batch of an array of examples; nil: torch-rb's way. It runs in the workers.
        # @param drop_last [Boolean] whether to leave out a last batch that is not full
        # @param num_workers [Integer] threads that read ahead; 0: none, each batch is read when it is asked for
        # @param prefetch_factor [Integer] how many batches ahead each of them may be
        # @param seed [Integer] of the order, the same on every process
        # @param device [String, Symbol, Torch::Device, nil] where the program gets batches: their tensors, also those within
        #   arrays, hashes, Structs and Data objects, are moved there on its thread, each in its own dtype. nil: they stay where they are
        # @raise [ArgumentError, TypeError] naming the argument, what it is and what was expected
        def initialize(dataset, batch_size: 1, shuffle: false, sampler: nil, batch_sampler: nil, collate_fn: nil, drop_last: false,
          num_workers: 0, prefetch_factor: 2, seed: 0, device: nil)
          check(dataset, batch_size, shuffle, sampler, batch_sampler, drop_last)
          check_number("num_workers", num_workers, 0)
          check_number("prefetch_factor", prefetch_factor, 1)
          @device = device_of(device)
          super(dataset, batch_size: batch_size, shuffle: shuffle, collate_fn: collate_fn)
          @batch_sampler = batch_sampler
          @batch_size = nil if batch_sampler
          @sampler = sampler || (batch_sampler ? nil : default_sampler(shuffle, seed))
          @drop_last = drop_last
          @workers = num_workers
          @ahead = num_workers * prefetch_factor
          @fetcher = BatchFetcher.new(dataset, @collate_fn, whole: collate_fn.nil?)
          @epoch = stateful? ? @sampler._progress.first : Progress::Epoch.new
          @progress = Progress.new(@epoch)
        end

        # A loop that begins within another one over this loader begins at the start and does not move the position of {#state_dict}.
        #
        # @yieldparam batch [Object] what the collate_fn made, on `device`
        # @return [Enumerator, self]
        def each(&block)
          return enum_for(:each) { size } unless block

          run do |batches, given|
            if @workers.zero?
              batches.call { |indices| hand_out(indices, data_span { @fetcher.call(indices) }, given, &block) }
            else
              each_ahead(batches, given, &block)
            end
          end
          self
        end

        # The sampler's, so that its order is another one. An epoch of which a part was loaded with {#load_state_dict} goes on there; another one
        # begins at its start.
        #
        # @param epoch [Integer] the same on every process
        def set_epoch(epoch) # standard:disable Naming/AccessorMethodName
          @epoch.set(epoch) unless stateful?
          [@sampler, @batch_sampler].each { |each| each.set_epoch(epoch) if each.respond_to?(:set_epoch) }
        end
        alias_method :epoch=, :set_epoch

        # @return [Integer] how many batches an epoch has
        def size
          return @batch_sampler.size if @batch_sampler

          @drop_last ? @sampler.size / @batch_size : (@sampler.size + @batch_size - 1) / @batch_size
        end
        alias_method :length, :size

        # As Enumerable's; without an argument or a block it is {#size}, and nothing is read.
        def count(*item, &block)
          (item.empty? && !block) ? size : each.count(*item, &block)
        end

        # Where this loader is: which batches the program was given, not which were read ahead, and whether the epoch is finished. With a
        # {DistributedSampler} it may go on with another batch_size or number of processes. Save it after a batch was trained on, or after an epoch.
        #
        # @return [Hash{String => Object}]
        def state_dict
          place = @progress.place
          stateful? ? {"sampler" => @sampler.state_at(place)} : {"batches" => place.at, "epoch" => place.epoch, "finished" => place.finished}
        end

        # The next {#each} begins after the batches that had been handed out then. Where the epoch was finished, it is a whole one; if
        # {#set_epoch} names that same epoch first, nothing is left of it.
        #
        # @param state [Hash{String => Object}]
        # @return [self]
        def load_state_dict(state)
          key = stateful? ? "sampler" : "batches"
          unless state.is_a?(Hash) && state.key?(key)
            raise ArgumentError, "state_dict: expected a Hash with \"#{key}\", as this loader's state_dict gives it, got #{state.inspect}"
          end

          place = stateful? ? @sampler.place_of(state[key]) : place_of(state)
          @sampler._progress.last.load(place, self) if stateful?
          @progress.load(place)
          self
        end

        private

        def check(dataset, batch_size, shuffle, sampler, batch_sampler, drop_last)
          if dataset.is_a?(IterableDataset)
            raise ArgumentError, "dataset: an IterableDataset has no indices to share: give each process a part of its own"
          end
          raise ArgumentError, "shuffle: the sampler decides on the order: leave one of them" if sampler && shuffle
          if batch_sampler && (batch_size != 1 || shuffle || sampler || drop_last)
            raise ArgumentError, "batch_sampler: it stands instead of batch_size, shuffle, sampler and drop_last: leave those"
          end

          check_number("batch_size", batch_size, 1)
        end

        def check_number(name, value, least)
          return if value.is_a?(Integer) && value >= least

          raise ArgumentError, "#{name}: expected #{least} or more, got #{value.inspect}"
        end

        # A device that cannot be used here is found before the first batch.
        def device_of(device)
          return if device.nil?
          unless device.is_a?(String) || device.is_a?(Symbol) || device.is_a?(Torch::Device)
            raise TypeError, "device: expected a String, a Symbol, a Torch::Device or nil, got #{device.inspect}"
          end

          name = Torch::Distributed._device_name(device).to_s
          begin
            Torch.empty([0], device: name)
          rescue => e
            raise ArgumentError, "device: expected one that can be used here, got #{name.inspect}: #{e.message.lines.first&.chomp}"
          end
          name
        end

        def default_sampler(shuffle, seed)
          alone = Torch::Distributed.initialized? ? {} : {num_replicas: 1, rank: 0}
          DistributedSampler.new(@dataset, shuffle: shuffle, seed: seed, **alone)
        end

        # Whether positions are the sampler's, rather than whole batches that are counted here.
        def stateful?
          @sampler.is_a?(DistributedSampler)
        end

        def place_of(state)
          batches, epoch = [state["batches"], state.fetch("epoch", @epoch.number)].map { |number| Integer(number) }
          Progress::Place.new(epoch, batches, state["finished"] == true)
        end

        # @yieldparam batches [Proc] yields the indices of each batch, on the thread of the program: the sampler need not know of threads
        # @yieldparam given [Proc] is called with the indices of a batch that the program gets
        def run
          if stateful?
            from = @progress.resume || @sampler._progress.last.resume(self)
            @sampler.run(from) do |share, its|
              @progress.run(from) do |own|
                given = ->(indices) { [its, own].each { |each| each.advance(indices.size * @sampler.num_replicas) } }
                yield ->(&take) { share.each_slice(@batch_size) { |indices| take.call(indices) unless short?(indices) } }, given
              end
            end
          else
            from = @progress.resume
            @progress.run(from) { |own| yield ->(&take) { plain_batches(from, &take) }, ->(_) { own.advance(1) } }
          end
        end

        # Of an epoch that is finished nothing is left, however many batches it would have now.
        def plain_batches(from)
          return if from&.finished

          skip = from ? from.at : 0
          (@batch_sampler || @sampler.each_slice(@batch_size)).each do |indices|
            next skip -= 1 if skip.positive?

            yield Array.new(indices.to_a) unless short?(indices)
          end
        end

        def short?(indices)
          @drop_last && indices.size < @batch_size
        end

        def each_ahead(batches, given, &block)
          prefetcher = Prefetcher.new(@fetcher, @workers)
          batches.call do |indices|
            prefetcher.ask(indices)
            hand_out(*data_span { prefetcher.take }, given, &block) if prefetcher.asked > @ahead
          end
          hand_out(*data_span { prefetcher.take }, given, &block) while prefetcher.asked.positive?
        ensure
          prefetcher&.stop
        end

        # Counted before the program has it: what it saves afterwards includes this batch.
        def hand_out(indices, batch, given)
          given.call(indices)
          yield @device ? Torch::Distributed::Nested.to(batch, @device) : batch
        end

        def data_span(&block)
          Torch::Distributed.trace("data", &block)
        end
      end
    end
  end
end
