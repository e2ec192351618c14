# frozen_string_literal: true

module Torch
  module Distributed
    # The units of one model in libtddp_torch.
    #
    # @api private
    class ShardedModel; end

    module FSDP
      # A model on its parts' way to become one, and one at last: its units.
      #
      # @api private
      class State
        # @return [ShardedModel]
        attr_reader :model

        # @return [Array<Unit>]
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
          @model = ShardedModel.new
          @units = []
          @count = 0
          @running = 0
        end

        # @param parameters [Parameters]
        # @param offload [Boolean, nil] whether memory of the CPU is pinned; nil: the unit is not offloaded
        # @return [Integer, nil] the number of a new unit; nil: it has no parameter
        def add(unit, name, groups, parameters, gather_dtype:, reduce_dtype:, reshard:, offload:)
          unless parameters.empty?
            @model.send(:_add, name, *groups, parameters.list, parameters.names, gather_dtype, reduce_dtype, reshard, offload)
          end
          @units << unit
          next_number unless parameters.empty?
        end

        def absorb(other)
          @model.merge(other.model)
          other.units.each { |unit| unit.join(self, unit.number && next_number) }
          @units.concat(other.units)
        end

        # Around each forward of a unit.
        def running(unit)
          begin_forward(unit) if @running.zero?
          @running += 1
          begin
            yield
          ensure
            @running -= 1
            @model.end_forward if @running.zero?
          end
        end

        private

        # Of the model, or of a part of it, from outside.
        def begin_forward(unit)
          @model.abandon if @model.unfinished?
          @root ||= unit.tap(&:become_root)
          StepMemory.instance.step if unit.equal?(@root) && Torch.grad_enabled?
          @model.begin_forward
        end

        def next_number
          @count += 1
          @count - 1
        end
      end
      private_constant :State
    end
  end
end
