# frozen_string_literal: true

module Torch
  module Distributed
    module FSDP
      # A model on its parts' way to become one, and one at last: its units.
      #
      # @api private
      class State
        # @return [Model]
        attr_reader :model

        # @return [Array<Unit>] in the order of their numbers in the model, and those without a parameter
        attr_reader :units

        class << self
          # @param states [Array<State>] of a model's parts
          # @return [State] that has the units of all
          def merge(states)
            first, *others = states
            others.each { |other| first.absorb(other) }
            first || new
          end
        end

        def initialize
          @model = Model.new
          @units = []
          @running = 0
        end

        # @param parameters [Parameters]
        # @return [Integer] the number of a new unit
        def add(unit, name, groups, parameters, gather_dtype:, reduce_dtype:, reshard:)
          @model.send(:_add, name, *groups, parameters.list, parameters.names, gather_dtype, reduce_dtype, reshard)
          @units << unit
          @units.size - 1
        end

        def absorb(other)
          @model.merge(other.model)
          other.units.each { |unit| unit.join(self, @units.size).then { @units << unit } }
        end

        # Around each forward of a unit.
        def running(unit)
          if @running.zero?
            @model.abandon if @model.unfinished?
            unit.settle_as_root if @root.nil?
            @root ||= unit
          end
          @running += 1
          yield
        ensure
          @running -= 1
        end

        def sync=(value)
          @model.sync = value
        end
      end
      private_constant :State
    end
  end
end
