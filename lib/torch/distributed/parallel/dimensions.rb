# frozen_string_literal: true

module Torch
  module Distributed
    class Parallel
      # The dimensions of a mesh by what they mean, and this process's place in them.
      #
      # @api private
      class Dimensions
        NAMES = %w[pp dp dp_replicate dp_shard tp].freeze
        private_constant :NAMES

        # @param mesh [DeviceMesh]
        # @param shard [Symbol, String, nil]
        def initialize(mesh, shard)
          raise TypeError, "mesh: expected a DeviceMesh, got #{mesh.inspect}" unless mesh.is_a?(DeviceMesh)

          @names = mesh.mesh_dim_names.to_a
          unknown = @names - NAMES
          unless unknown.empty? && @names.any?
            raise ArgumentError, "mesh: expected dimensions among #{NAMES.join(", ")}, got #{@names.empty? ? "none with a name" : @names.join(", ")}"
          end
          raise ArgumentError, "mesh: expected dp, or dp_replicate and dp_shard, got both" if @names.include?("dp") && data.size > 1
          raise ArgumentError, "mesh: process #{Distributed.get_rank} is not in it" unless mesh.get_coordinate

          @mesh = mesh
          check_shard(shard)
        end

        # @return [Integer] how many processes there are along "pp"
        def pp
          size("pp")
        end

        # @return [Integer] this one's place along it
        def pp_rank
          place("pp")
        end

        # @return [ProcessGroup, nil] nil: there is one stage for each process
        def pp_group
          @mesh.get_group("pp") if pp > 1
        end

        # @return [DeviceMesh, nil]
        def tp_mesh
          @mesh["tp"] if size("tp") > 1
        end

        # @return [DeviceMesh, nil] of one dimension, or of replicas and shards; nil: there is none
        def data_mesh
          @mesh[*data] if data.any?
        end

        def data_size
          data.inject(1) { |product, name| product * size(name) }
        end

        def data_rank
          data.inject(0) { |rank, name| rank * size(name) + place(name) }
        end

        # @param value [Float] of this process's data
        # @return [Float] the mean over all
        def mean(value)
          groups = data.select { |name| size(name) > 1 }.map { |name| @mesh.get_group(name) }
          groups.inject(value) do |sum, group|
            total = Distributed.send(:group_tensor, group, [sum], :float64)
            Distributed.all_reduce(total, op: :avg, group: group)
            total.item
          end
        end

        def to_s
          @names.map { |name| "#{name} #{size(name)}" }.join(", ")
        end

        private

        def data
          @names.select { |name| name.start_with?("dp") }
        end

        def size(name)
          index = @names.index(name)
          index ? @mesh.shape[index] : 1
        end

        def place(name)
          index = @names.index(name)
          index ? @mesh.get_coordinate[index] : 0
        end

        def check_shard(shard)
          known = FSDP::ShardingStrategy::ALL
          return if shard.nil? && data.size < 2
          unless known.include?(shard.to_s.to_sym)
            raise ArgumentError, "shard: expected one of #{known.inspect}#{" or nil" if data.size < 2}, got #{shard.inspect}"
          end
          return if (shard.to_s == "hybrid_shard") == (data.size == 2)

          raise ArgumentError, "shard: #{shard}: expected #{(data.size == 2) ? "hybrid_shard" : "a mesh with"} dp_replicate and dp_shard, got #{self}"
        end
      end
      private_constant :Dimensions
    end
  end
end
