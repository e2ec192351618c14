# frozen_string_literal: true

module Torch
  module NN
    module Parallel
      class DistributedDataParallel < Module
        # Where a model has its parameters and modules: in instance variables, and in what `register_parameter` and `add_module` fill.
        # A look at these places before each forward, far cheaper than `named_parameters`, tells whether a parameter or a layer was
        # replaced, added or taken away, whose gradients would stay on each rank.
        #
        # @api private
        class Places
          HASHES = %i[@parameters @modules].freeze
          private_constant :HASHES

          # @param mod [Torch::NN::Module]
          def initialize(mod)
            modules = mod.named_modules.values
            @counts = modules.map { |each| [each, each.instance_variables.size] }
            @variables = modules.flat_map do |each|
              each.instance_variables.filter_map do |name|
                value = each.instance_variable_get(name)
                [each, name, value] if value.is_a?(Module) || value.is_a?(Parameter)
              end
            end
            @hashes = modules.flat_map { |each| HASHES.filter_map { |name| each.instance_variable_get(name) } }.map { |hash| [hash, hash.values] }
          end

          # @return [Boolean] whether everything is where it was, and nothing is new
          def same?
            @variables.all? { |mod, name, value| mod.instance_variable_get(name).equal?(value) } &&
              @counts.all? { |mod, count| mod.instance_variables.size == count } &&
              @hashes.all? { |hash, values| hash.size == values.size && (values.empty? || same_objects?(hash.values, values)) }
          end

          private

          def same_objects?(one, two)
            one.zip(two).all? { |left, right| left.equal?(right) }
          end
        end
        private_constant :Places
      end
    end
  end
end
