# frozen_string_literal: true

require_relative "mesh_layout"

module Torch
  module Distributed
    # Makes a {DeviceMesh} of the first processes, counted row by row.
    module Meshes
      # @param device_type [String, Symbol] "cpu" or "cuda"
      # @param mesh_shape [Array<Integer>] how many processes there are along each dimension
      # @param mesh_dim_names [Array<String, Symbol>, nil] the dimensions' names, for slices
      # @return [DeviceMesh]
      # @raise [ArgumentError] naming the argument that is wrong
      # @see DeviceMesh#initialize
      def init_device_mesh(device_type, mesh_shape, mesh_dim_names: nil)
        DeviceMesh.new(device_type, -> { MeshLayout.count(mesh_shape) }, mesh_dim_names: mesh_dim_names)
      end
    end

    # Processes arranged in a grid, with a process group for each line of it.
    #
    #   mesh = Torch::Distributed.init_device_mesh(:cpu, [2, 4], mesh_dim_names: ["dp", "tp"])
    #   Torch::Distributed.all_reduce(gradient, group: mesh.get_group("dp"))
    #   mesh["tp"].size                                    # 4
    #
    # Dimensions are given by number or by name. The groups are made once: slices of a mesh share them, and equal slices
    # are the same object. A dimension along which all processes lie has the default group.
    class DeviceMesh
      # @return [String] "cpu" or "cuda"
      attr_reader :device_type

      # @return [Array<String>, nil] the dimensions' names
      attr_reader :mesh_dim_names

      class << self
        # Makes a mesh of groups that are there already. Nothing is asked of other processes.
        #
        # @param group [ProcessGroup, Array<ProcessGroup>] the group of each dimension that this process is in
        # @param device_type [String, Symbol]
        # @param mesh [Array, Torch::Tensor, nil] global ranks; needed for several groups, for one group they are its own
        # @param mesh_dim_names [Array<String, Symbol>, nil]
        # @return [DeviceMesh]
        def from_group(group, device_type, mesh = nil, mesh_dim_names: nil)
          groups = group.is_a?(Array) ? group : [group]
          groups.each do |each|
            raise TypeError, "group: expected a Torch::Distributed::ProcessGroup, got #{each.inspect}" unless each.is_a?(ProcessGroup)
          end
          raise ArgumentError, "mesh: expected the ranks of #{groups.size} groups, got nil" if mesh.nil? && groups.size != 1

          allocate.tap { |made| made.send(:adopt, device_type, mesh.nil? ? groups.first.ranks : mesh, mesh_dim_names, groups) }
        end
      end

      # A call of all processes of the default group, which is initialized from the environment where there is none,
      # with the same arguments.
      #
      # @param device_type [String, Symbol] "cpu" or "cuda"
      # @param mesh [Array, Torch::Tensor, Proc] global ranks in nested lists, or what returns them; processes that are not in it
      #   have no coordinate, and {GroupMember::NON_GROUP_MEMBER} for groups
      # @param mesh_dim_names [Array<String, Symbol>, nil]
      # @raise [ArgumentError, TypeError] naming the argument that is wrong
      # @raise [MismatchError] if the processes ask for different meshes
      def initialize(device_type, mesh, mesh_dim_names: nil)
        unless Distributed.initialized?
          Distributed.init_process_group(Distributed.get_default_backend_for_device(device_type.to_s))
        end
        @rank = Distributed.get_rank
        @groups = {}
        made = Distributed.send(:form_groups, Distributed.default_process_group, "DeviceMesh",
          group_desc: method(:description_of), asked: method(:identity)) do
          describe(device_type, mesh, mesh_dim_names)
          lines(@axes)
        end
        share(@axes, made)
      end

      # @return [Array] the global ranks in nested lists
      def mesh
        @layout.nested
      end

      # @return [Integer] how many dimensions there are
      def ndim
        @layout.shape.size
      end

      # @return [Array<Integer>] how many processes there are along each dimension
      def shape
        @layout.shape
      end

      # @param dim [Integer, String, Symbol, nil] nil: all of them
      # @return [Integer] how many processes there are
      def size(dim = nil)
        dim.nil? ? @layout.ranks.size : shape[number_of(dim)]
      end

      # @return [Integer] this process's global rank
      def get_rank
        @rank
      end

      # @return [Array<Integer>, nil] this process's place along each dimension; nil if it is not in the mesh
      def get_coordinate
        @layout.coordinate(@rank)
      end

      # @param dim [Integer, String, Symbol, nil] may be left out where there is one only
      # @return [Integer] this process's place along a dimension; -1 if it is not in the mesh
      def get_local_rank(dim = nil)
        dim = only_dimension("get_local_rank") if dim.nil?
        get_coordinate&.at(number_of(dim)) || -1
      end

      # @param dim [Integer, String, Symbol, nil] may be left out where there is one only
      # @return [ProcessGroup, Object] the group of this process along a dimension
      def get_group(dim = nil)
        dim = only_dimension("get_group") if dim.nil?
        @root.send(:group_along, @axes[number_of(dim)])
      end

      # @return [Array<ProcessGroup>] this process's group along each dimension
      def get_all_groups
        Array.new(ndim) { |dim| get_group(dim) }
      end

      # The part of the mesh that this process is in, along some of its dimensions.
      #
      # @param names [Array<String, Symbol>] in the mesh's order; also those of flattened dimensions
      # @return [DeviceMesh]
      # @raise [ArgumentError] naming what there is
      def [](*names)
        names = names.flatten.map(&:to_s)
        known = named_axes
        names.each do |name|
          next if known.key?(name)

          raise ArgumentError, "mesh[#{name.inspect}]: expected names of its dimensions, " +
            (known.empty? ? "but it has none: give mesh_dim_names" : known.keys.map(&:inspect).join(", "))
        end
        raise ArgumentError, "mesh[]: expected at least one name" if names.empty?

        @root.send(:slice, known.values_at(*names), names)
      end

      # Makes one dimension of all. The name can then be used on the mesh this one is a slice of. A call of all
      # processes of that mesh.
      #
      # @param mesh_dim_name [String, Symbol, nil] nil: the names, joined by "_"
      # @return [DeviceMesh]
      def flatten(mesh_dim_name = nil)
        raise ArgumentError, "flatten needs a mesh with names: give mesh_dim_names" unless @mesh_dim_names

        @root.send(:flatten_axes, @axes, (mesh_dim_name || @mesh_dim_names.join("_")).to_s)
      end
      alias_method :_flatten, :flatten

      # @return [Boolean] whether it has the same processes in the same places, names and type of device
      def ==(other)
        other.is_a?(DeviceMesh) && identity == other.identity
      end
      alias_method :eql?, :==

      # @return [Integer] equal for meshes that are equal
      def hash
        identity.hash
      end

      # @return [String]
      def inspect
        sizes = @mesh_dim_names ? @mesh_dim_names.zip(shape).map { |pair| pair.join("=") }.join(" ") : shape.join("x")
        "#<#{self.class.name} #{device_type} #{sizes} #{mesh.inspect}>"
      end
      alias_method :to_s, :inspect

      protected

      def identity
        [device_type, mesh, mesh_dim_names].compact
      end

      private

      # --- a mesh that is no slice has the groups, and its slices ask it for them ---

      def describe(device_type, mesh, names)
        @layout = MeshLayout.of(mesh.is_a?(Proc) ? mesh.call : mesh, Distributed.get_world_size)
        @device_type = MeshLayout.check_device_type(device_type)
        @mesh_dim_names = MeshLayout.check_names(names, @layout.shape)
        @root = self
        @axes = Array.new(ndim) { |dim| [dim].freeze }.freeze
        @slices = {}
        @flattened = {}
      end

      # The lists of ranks that need a group, of all processes along each of the axes.
      def lines(axes)
        all_ranks = Distributed.default_process_group.ranks
        axes.flat_map { |axis| @layout.lines(axis) }.uniq - [all_ranks]
      end

      # `made` are the groups of {#lines}; a process is in one at most for each axis.
      def share(axes, made)
        places = lines(axes).zip(made).to_h
        places[Distributed.default_process_group.ranks] = Distributed.default_process_group
        axes.each do |axis|
          mine = @layout.lines(axis).find { |line| line.include?(@rank) }
          @groups[axis] = mine ? places.fetch(mine) : GroupMember::NON_GROUP_MEMBER
        end
      end

      def description_of(line)
        dim = @axes.index { |axis| @layout.lines(axis).include?(line) }
        "mesh_#{@mesh_dim_names ? @mesh_dim_names[dim] : "dim_#{dim}"}"
      end

      def adopt(device_type, mesh, names, groups)
        @rank = Distributed.get_rank
        @groups = {}
        describe(device_type, mesh, names)
        raise ArgumentError, "mesh: expected #{groups.size} dimensions, one for each group, got #{ndim}" if ndim != groups.size

        groups.each_with_index do |group, dim|
          mine = @layout.lines([dim]).find { |line| line.include?(@rank) }
          if mine != group.ranks
            raise ArgumentError, "mesh: along dimension #{dim} global rank #{@rank} is in #{mine.inspect}, expected the ranks of " \
              "its group, #{group.ranks.inspect}"
          end
          @groups[[dim]] = group
        end
      end

      def group_along(axis)
        @groups.fetch(axis)
      end

      def slice(axes, names)
        return self if axes == @axes && names == @mesh_dim_names

        raise ArgumentError, "mesh#{names}: global rank #{@rank} is not in #{inspect}" unless get_coordinate
        unless axes.flatten.each_cons(2).all? { |before, after| before < after }
          raise ArgumentError, "mesh#{names}: expected dimensions that follow each other in the mesh's order, #{inspect}"
        end

        @slices[[axes, names]] ||= dup.tap { |copy| copy.send(:become_slice, axes, names) }
      end

      def become_slice(axes, names)
        @layout = @root.instance_variable_get(:@layout).slice(axes, @rank)
        @axes = axes
        @mesh_dim_names = names.map { |name| name.dup.freeze }.freeze
      end

      def flatten_axes(axes, name)
        axis = axes.flatten
        taken = named_axes[name]
        if taken && taken != axis
          raise ArgumentError, "mesh_dim_name: #{name.inspect} is the name of other dimensions of #{inspect}"
        end

        made = slice([axis], [name])
        unless @groups.key?(axis)
          wanted = lines([axis])
          groups = wanted.empty? ? [] : Distributed.send(:form_groups, Distributed.default_process_group, "DeviceMesh#flatten",
            members: @layout.ranks.sort, group_desc: "mesh_#{name}") { wanted }
          share([axis], groups)
        end
        @flattened[name] = axis unless taken
        made
      end

      # --- dimensions by name ---

      # A mesh of its own also knows flattened dimensions.
      def named_axes
        (@mesh_dim_names || []).zip(@axes).to_h.merge(equal?(@root) ? @flattened : {})
      end

      def number_of(dim)
        number = dim.is_a?(Integer) ? dim : @mesh_dim_names&.index(dim.to_s)
        return number if number&.between?(-ndim, ndim - 1)

        raise ArgumentError, "dimension #{dim.inspect}: expected 0 to #{ndim - 1}#{" or #{@mesh_dim_names.map(&:inspect).join(", ")}" if @mesh_dim_names}"
      end

      def only_dimension(operation)
        return 0 if ndim == 1

        raise ArgumentError, "#{operation}: expected a dimension, #{inspect} has #{ndim}"
      end
    end
  end
end
