# frozen_string_literal: true

module Torch
  module Utils
    module Data
      # Makes a batch of a data set's examples: at once where the data set allows it, else of one after the other. Any
      # thread, if the data set allows that.
      class BatchFetcher
        # @param dataset [#[]]
        # @param collate [#call] makes a batch of an array of examples
        # @param whole [Boolean] whether batches that the data set makes itself will do
        def initialize(dataset, collate, whole:)
          @dataset = dataset
          @collate = collate
          @tensors = tensors_of(dataset) if whole
          @fetches = whole && dataset.is_a?(Dataset) && dataset.respond_to?(:fetch)
        end

        # @param indices [Array<Integer>]
        # @return [Object] a batch
        def call(indices)
          return select(indices) if @tensors
          return @dataset.fetch(indices) if @fetches

          @collate.call(indices.map { |index| @dataset[index] })
        end

        private

        # A class of the program's own may mean something else by an example.
        def tensors_of(dataset)
          return unless dataset.instance_of?(TensorDataset)

          tensors = dataset.instance_variable_get(:@tensors)
          tensors if tensors.is_a?(Array) && tensors.all?(Tensor)
        end

        def select(indices)
          places = {}
          @tensors.map do |tensor|
            place = (places[tensor.device.to_s] ||= Torch.tensor(indices, dtype: :int64, device: tensor.device.to_s))
            Torch.index_select(tensor, 0, place)
          end
        end
      end
      private_constant :BatchFetcher
    end
  end
end
