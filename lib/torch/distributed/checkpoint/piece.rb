# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # What this rank has of a tensor that ranks divide: elements from `start` on of the tensor of `shape`, laid out flat. The
      # piece may be all of it, and may be empty.
      #
      # @api private
      Piece = Struct.new(:tensor, :shape, :start) do
        # @return [Integer]
        def count
          tensor.numel
        end

        # @return [Integer] elements of the whole tensor
        def total
          shape.inject(1, :*)
        end

        # Whether this rank says what is saved: one without an element knows nothing, unless there is none.
        def known?
          count.positive? || total.zero?
        end

        # Takes over values, in place.
        #
        # @param value [Torch::Tensor, Slice]
        def fill(value)
          values = value.is_a?(Slice) ? value.values : value
          tensor.copy!(values.reshape(tensor.shape)) if tensor.numel.positive?
        end
      end

      # A range of a tensor that was saved, in memory of its own.
      #
      # @api private
      # @!attribute shape
      #   @return [Array<Integer>] that of the whole tensor
      # @!attribute values
      #   @return [Torch::Tensor, nil] of one dimension; nil: it was not read, since it does not fit
      Slice = Struct.new(:shape, :dtype, :values)

      # A tensor in a checkpoint's files, which is read when it is asked for.
      #
      # @api private
      class Stored
        # @return [Array<Integer>]
        attr_reader :shape

        # @return [String]
        attr_reader :dtype

        # @param place [Hash] what the manifest says of it
        # @param block [Integer, nil] how many bytes a checksum covers; nil: the tensor has one
        # @param file_of [Proc] opens a file by its name
        def initialize(name, place, block, file_of)
          @name = name
          @place = place
          @block = block
          @file_of = file_of
          @shape = place["shape"]
          @dtype = place["dtype"]
        end

        # @return [Torch::Tensor] all of it, the same each time
        def whole
          @whole ||= @block ? read(0, @shape.inject(1, :*)).reshape(@shape) : DataFile.read_tensor(@file_of.call(@place["file"]), @name, @place)
        end

        # Reads no more than the range where the checkpoint was divided; else the checksum is that of the whole.
        #
        # @return [Torch::Tensor] of one dimension, in memory of its own, the same each time
        def range(start, count)
          (@ranges ||= {})[[start, count]] ||= @block ? read(start, count) : part_of_whole(start, count)
        end

        # A range of a tensor or of one that is stored.
        #
        # @param source [Torch::Tensor, Stored]
        # @return [Slice]
        def self.slice(source, start, count)
          dtype = source.is_a?(Stored) ? source.dtype : Checkpoint.dtype_name(source)
          fits = start + count <= source.shape.inject(1, :*)
          return Slice.new(source.shape, dtype, nil) unless fits

          values = source.is_a?(Stored) ? source.range(start, count) : source.detach.reshape(-1).narrow(0, start, count).clone
          Slice.new(source.shape, dtype, values)
        end

        private

        def part_of_whole(start, count)
          DataFile.read_tensor(@file_of.call(@place["file"]), @name, @place).reshape(-1).narrow(0, start, count).clone
        end

        def read(start, count)
          result = Checkpoint.room(@dtype, [count])
          @place["pieces"].each do |piece|
            from = [start, piece["start"]].max
            to = [start + count, piece["start"] + piece["count"]].min
            next if from >= to

            DataFile.read_part(@file_of.call(piece["file"]), @name, piece, @block, from - piece["start"], result.narrow(0, from - start, to - from))
          end
          result
        end
      end
    end
  end
end
