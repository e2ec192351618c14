# frozen_string_literal: true

module Torch
  module Distributed
    module FSDP
      # The parameters that become a unit: those of its modules which are within no other unit. Some may be another unit's
      # already, which shares them with this one.
      #
      # @api private
      class Parameters
        # Where a module keeps a parameter.
        Place = Struct.new(:name, :mod, :key, :parameter) do
          def taken?
            current = mod.instance_variable_get("@#{key}")
            current = mod.instance_variable_get(:@parameters)&.[](key) unless current.is_a?(Torch::NN::Parameter)
            !current.equal?(parameter)
          end
        end
        private_constant :Place

        # @return [Array<Torch::NN::Parameter>]
        attr_reader :list

        # @return [Array<String>] their names in the module
        attr_reader :names

        # @return [Array<Unit>] those that own parameters which these modules use, too
        attr_reader :lenders

        # @param modules [Array<Torch::NN::Module>]
        # @param ignored [Enumerable<Torch::NN::Parameter>]
        def initialize(modules, ignored)
          left_alone = {}.compare_by_identity
          ignored.each do |each|
            raise TypeError, "ignored_params: expected parameters, got #{each.inspect}" unless each.is_a?(Torch::Tensor)

            left_alone[each] = true
          end
          @places = places(modules).reject { |place| left_alone[place.parameter] }
          @lenders = @places.filter_map { |place| Unit.owner(place.parameter) }.uniq
          named = @places.uniq { |place| place.parameter.object_id }.reject { |place| Unit.owner(place.parameter) }
          @list = named.map(&:parameter)
          @names = named.map(&:name)
          check
        end

        def empty?
          @list.empty?
        end

        # @return [Array<Array(Torch::NN::Module, Unit)>] modules that have parameters themselves, and which units shard those
        def owners
          @places.map { |place| [place.mod, Unit.owner(place.parameter)] }.uniq { |pair| pair.map(&:object_id) }
        end

        # @raise [ArgumentError] naming a parameter in whose place there is another now
        def check_places
          place = @places.find(&:taken?) or return
          raise ArgumentError, "parameter #{place.name.inspect} of a #{place.mod.class} is another one than when it was sharded: " \
            "change, move or convert a model before it is sharded"
        end

        private

        def places(modules)
          found = []
          seen = {}.compare_by_identity
          modules.each_with_index { |mod, index| collect(mod, (modules.size > 1) ? "#{index}." : "", found, seen) }
          found
        end

        # Not what is within another unit.
        def collect(mod, prefix, found, seen)
          return if seen[mod]

          seen[mod] = true
          mod.named_parameters(recurse: false).each { |name, parameter| found << Place.new("#{prefix}#{name}", mod, name, parameter) }
          mod.named_children.each do |name, child|
            collect(child, "#{prefix}#{name}.", found, seen) if child.is_a?(Torch::NN::Module) && !Unit.of(child)
          end
        end

        def check
          @list.each_with_index do |parameter, i|
            if parameter.dim.zero?
              raise ArgumentError, "parameter #{@names[i].inspect} has no dimension: expected at least one, such as a shape of [1]"
            end
            next if [parameter.dtype, parameter.device.to_s] == [@list.first.dtype, @list.first.device.to_s]

            raise ArgumentError, "parameter #{@names[i].inspect} is #{parameter.dtype.inspect} on #{parameter.device}, " \
              "#{@names.first.inspect} #{@list.first.dtype.inspect} on #{@list.first.device}: expected one dtype and device in a unit; " \
              "shard their modules apart"
          end
        end
      end
      private_constant :Parameters
    end
  end
end
