# frozen_string_literal: true

module Torch
  module Distributed
    module FSDP
      # The parameters that become a unit, their names, and where the modules keep them.
      #
      # @api private
      class Parameters
        # A module's instance variable, or the entry of its `@parameters`.
        Place = Struct.new(:mod, :key, :parameter) do
          def taken?
            !current.equal?(parameter)
          end

          def current
            key.start_with?("@") ? mod.instance_variable_get(key) : mod.instance_variable_get(:@parameters)&.[](key)
          end
        end
        private_constant :Place

        # @return [Array<Torch::NN::Parameter>]
        attr_reader :list

        # @return [Array<String>] their names in the module
        attr_reader :names

        # @param modules [Array<Torch::NN::Module>]
        # @param parts [Array<Unit>] units within them, whose parameters are left to these
        # @param ignored [Enumerable<Torch::NN::Parameter>]
        def initialize(modules, parts, ignored)
          others = {}.compare_by_identity
          parts.each { |unit| unit.parameters.each { |each| others[each] = true } }
          ignored.each do |each|
            raise TypeError, "ignored_params: expected parameters, got #{each.inspect}" unless each.is_a?(Torch::Tensor)

            others[each] = true
          end
          named = collect(modules).reject { |parameter, _| others[parameter] }
          @list = named.keys
          @names = named.values
          check
          @places = places(modules)
        end

        def empty?
          @list.empty?
        end

        # @raise [ArgumentError] naming a parameter in whose place there is another now
        def check_places
          place = @places.find(&:taken?) or return
          name = @names[@list.index { |each| each.equal?(place.parameter) }]
          raise ArgumentError, "parameter #{name.inspect} of a #{place.mod.class} is another one than when it was sharded: " \
            "change, move or convert a model before it is sharded"
        end

        private

        def collect(modules)
          named = {}.compare_by_identity
          modules.each_with_index do |mod, index|
            prefix = (modules.size > 1) ? "#{index}." : ""
            mod.named_parameters.each { |name, parameter| named[parameter] ||= "#{prefix}#{name}" }
          end
          named
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

        def places(modules)
          wanted = {}.compare_by_identity
          @list.each { |each| wanted[each] = true }
          modules.flat_map { |each| each.modules.to_a }.uniq(&:object_id).flat_map do |mod|
            found = mod.instance_variables.to_h { |key| [key.to_s, mod.instance_variable_get(key)] }
            found.merge!(mod.instance_variable_get(:@parameters).to_h.transform_keys(&:to_s))
            found.select { |_, value| value.is_a?(Torch::NN::Parameter) && wanted[value] }.map { |key, value| Place.new(mod, key, value) }
          end
        end
      end
      private_constant :Parameters
    end
  end
end
