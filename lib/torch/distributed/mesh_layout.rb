# frozen_string_literal: true

module Torch
  module Distributed
    # Ranks in a grid: numbers only, without groups.
    #
    # @api private
    class MeshLayout
      # @return [Array<Integer>]
      attr_reader :shape

      # @return [Array<Integer>] row by row
      attr_reader :ranks

      class << self
        # @param mesh [Array, Torch::Tensor] nested lists of global ranks
        # @param world_size [Integer]
        def of(mesh, world_size)
          mesh = mesh.to_a if mesh.is_a?(Torch::Tensor)
          raise TypeError, "mesh: expected nested Arrays of ranks or a Torch::Tensor, got #{mesh.inspect}" unless mesh.is_a?(Array)

          layout = new(shape_of(mesh), mesh.flatten)
          layout.check(world_size)
          layout
        end

        # @return [Array] nested lists of 0, 1, 2...
        def count(shape)
          unless shape.is_a?(Array) && !shape.empty? && shape.all? { |size| size.is_a?(Integer) && size.positive? }
            raise ArgumentError, "mesh_shape: expected an Array of sizes from 1, got #{shape.inspect}"
          end

          new(shape, (0...shape.inject(:*)).to_a).nested
        end

        def check_device_type(type)
          return type.to_s.dup.freeze if text?(type) && type.match?(/\A[a-z]+\z/)

          raise ArgumentError, "device_type: expected a type of device such as \"cpu\", without a number, got #{type.inspect}"
        end

        def check_names(names, shape)
          return if names.nil?
          unless names.is_a?(Array) && names.all? { |name| text?(name) && !name.empty? }
            raise ArgumentError, "mesh_dim_names: expected an Array of names, got #{names.inspect}"
          end
          raise ArgumentError, "mesh_dim_names: expected #{shape.size}, one for each dimension, got #{names.inspect}" if names.size != shape.size

          names = names.map { |name| name.to_s.dup.freeze }.freeze
          return names if names.uniq.size == names.size

          raise ArgumentError, "mesh_dim_names: expected different names, got #{names.inspect}"
        end

        private

        def text?(value)
          value.is_a?(String) || value.is_a?(Symbol)
        end

        def shape_of(mesh)
          return [] unless mesh.is_a?(Array)
          raise ArgumentError, "mesh: expected ranks, got an empty Array" if mesh.empty?

          shapes = mesh.map { |part| shape_of(part) }.uniq
          raise ArgumentError, "mesh: expected lists of the same size, got #{mesh.inspect}" if shapes.size > 1

          [mesh.size, *shapes.first]
        end
      end

      def initialize(shape, ranks)
        @shape = shape.dup.freeze
        @ranks = ranks.dup.freeze
      end

      def check(world_size)
        wrong = ranks.index { |rank| !rank.is_a?(Integer) || !rank.between?(0, world_size - 1) }
        if wrong
          raise ArgumentError, "mesh: expected ranks from 0 to #{world_size - 1} (world size #{world_size}), got #{ranks[wrong].inspect}" \
            "#{" in a mesh of #{shape.join("x")} = #{ranks.size} processes" if shape.size > 1}"
        end
        twice = ranks.tally.find { |_, times| times > 1 }
        raise ArgumentError, "mesh: rank #{twice.first} is there #{twice.last} times" if twice
      end

      # @return [Array] nested lists
      def nested
        @nested ||= shape.drop(1).reverse.inject(ranks) { |rows, size| rows.each_slice(size).to_a }.freeze
      end

      # @return [Array<Integer>, nil] where a rank is
      def coordinate(rank)
        index = ranks.index(rank)
        return unless index

        shape.reverse.map do |size|
          index, place = index.divmod(size)
          place
        end.reverse
      end

      # @param axis [Array<Integer>] dimensions that are taken for one
      # @return [Array<Array<Integer>>] the ranks of each line along them
      def lines(axis)
        others = (0...shape.size).to_a - axis
        places(others).map do |outer|
          places(axis).map { |inner| at(others.zip(outer) + axis.zip(inner)) }
        end
      end

      # @param axes [Array<Array<Integer>>]
      # @return [MeshLayout] what lies along these axes where `rank` is
      def slice(axes, rank)
        here = coordinate(rank).each_with_index.map { |place, dim| [dim, place] }
        dims = axes.flatten
        inside = places(dims).map { |inner| at(here + dims.zip(inner)) }
        MeshLayout.new(axes.map { |axis| axis.map { |dim| shape[dim] }.inject(:*) }, inside)
      end

      private

      # Every place along some dimensions, row by row.
      def places(dims)
        first, *rest = dims.map { |dim| (0...shape[dim]).to_a }
        first ? first.product(*rest) : [[]]
      end

      # The rank at a place, given as pairs of dimension and number; the last one counts.
      def at(pairs)
        place = pairs.to_h
        ranks[shape.each_with_index.inject(0) { |index, (size, dim)| index * size + place.fetch(dim) }]
      end
    end
  end
end
