# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # Which elements this rank has of a parameter that ranks divide.
      #
      # @api private
      # @!attribute shape
      #   @return [Array<Integer>] that of the whole parameter
      # @!attribute layout
      #   @return [Tensor::Layout, nil] that of tensor dimensions
      # @!attribute start
      #   @return [Integer] where what this rank has begins within its part of that layout
      # @!attribute group
      #   @return [ProcessGroup, nil] whose ranks divide that part further
      Place = Struct.new(:shape, :layout, :start, :group) do
        # @param first [Integer] within what this rank has
        # @return [Array<Region>] where these elements lie in the whole parameter
        def regions(first, count)
          return Region.cut(0, 1, 1, start + first, count) unless layout&.divided?

          Region.cut(layout.offset, layout.width, layout.stride, start + first, count)
        end
      end

      # What this rank has of a tensor that ranks divide: the elements of some regions of the tensor of `shape`, one region's
      # after the other's. The piece may be all of it, and may be empty.
      #
      # @api private
      Piece = Struct.new(:tensor, :shape, :regions) do
        # @return [Piece] which is all of a tensor
        def self.whole(tensor, shape = tensor.shape)
          new(tensor, shape, Region.cut(0, 1, 1, 0, tensor.numel))
        end

        # @return [Torch::Tensor] of the shape of what this rank has
        def local
          tensor.respond_to?(:to_local) ? tensor.to_local : tensor
        end

        # Takes over values, in place.
        #
        # @param value [Torch::Tensor, Slice]
        def fill(value)
          values = value.is_a?(Slice) ? value.values : value
          local.then { |own| own.copy!(values.reshape(own.shape)) if own.numel.positive? }
        end
      end

      # Regions of a tensor that was saved, in memory of their own.
      #
      # @api private
      # @!attribute shape
      #   @return [Array<Integer>] that of the whole tensor
      # @!attribute values
      #   @return [Torch::Tensor, nil] of one dimension; nil: they were not read, since they do not fit or are not asked for
      Slice = Struct.new(:shape, :dtype, :values)

      # A tensor in a checkpoint's files, which is read when it is asked for.
      #
      # @api private
      class Stored
        # @return [String]
        attr_reader :name

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
          @whole ||= @block ? read(Region.cut(0, 1, 1, 0, @shape.inject(1, :*))).reshape(@shape) : read_all
        end

        # Reads no more than the ranges that have elements of the regions where the checkpoint was divided; else the checksum is that of
        # the whole.
        #
        # @return [Torch::Tensor] of one dimension, in memory of its own, the same each time
        def regions(regions)
          (@regions ||= {})[regions] ||= @block ? read(regions) : Stored.taken(read_all, regions)
        end

        # Regions of a tensor or of one that is stored.
        #
        # @param source [Torch::Tensor, Stored]
        # @param regions [Array<Region>, nil] nil: none is to be read
        # @return [Slice]
        def self.slice(source, regions)
          dtype = source.is_a?(Stored) ? source.dtype : Checkpoint.dtype_name(source)
          total = source.shape.inject(1, :*)
          return Slice.new(source.shape, dtype, nil) unless regions&.all? { |region| region.stop <= total }

          Slice.new(source.shape, dtype, source.is_a?(Stored) ? source.regions(regions) : taken(source, regions))
        end

        # @return [Torch::Tensor] of one dimension
        def self.taken(tensor, regions)
          flat = tensor.detach.reshape(-1)
          return flat.narrow(0, 0, 0).clone if regions.empty?

          parts = regions.map { |region| region.take(flat) }
          (parts.size == 1) ? parts.first : Torch.cat(parts)
        end

        private

        def read_all
          DataFile.read_tensor(@file_of.call(@place["file"]), @name, @place)
        end

        def read(regions)
          result = Checkpoint.room(@dtype, [regions.sum(&:count)])
          at = 0
          regions.each do |region|
            read_region(region, result.narrow(0, at, region.count))
            at += region.count
          end
          result
        end

        # @param into [Torch::Tensor] of one dimension: the region's elements
        def read_region(region, into)
          found = pieces.filter_map { |piece, saved| [piece, saved, *saved.common(region)] if saved.common(region) }
          if found.all? { |_, saved| saved.aligned?(region) }
            found.each do |piece, saved, from, to|
              first = region.before(from)
              read_part(piece, saved.before(from), into.narrow(0, first, region.before(to) - first))
            end
          else
            rearrange(region, found, into)
          end
        end

        # Brings what lies in another order into that of the tensor first, as far as the region reaches.
        def rearrange(region, found, into)
          around = region.contiguous? ? into : Checkpoint.room(@dtype, [region.stop - region.start])
          found.each do |piece, saved, from, to|
            first, last = [from, to].map { |element| saved.before(element) }
            values = Checkpoint.room(@dtype, [last - first])
            read_part(piece, first, values)
            saved.part(first, last - first).inject(0) do |at, part|
              part.each_view(around, region.start, values.narrow(0, at, part.count)) { |to_view, from_view| to_view.copy!(from_view) }
              at + part.count
            end
          end
          region.each_view(around, region.start, into) { |from_view, to_view| to_view.copy!(from_view) } unless region.contiguous?
        end

        # @return [Array<Array(Hash, Region)>]
        def pieces
          @pieces ||= @place["pieces"].map { |piece| [piece, Manifest.region(piece)] }
        end

        def read_part(piece, first, into)
          DataFile.read_part(@file_of.call(piece["file"]), @name, piece, @block, first, into)
        end
      end
    end
  end
end
