# frozen_string_literal: true

require_relative "../../utils/checkpoint/layers"

module Torch
  module Distributed
    class MemoryEstimate
      # The parameters of a model, and the units that they form when it is sharded.
      #
      # @api private
      class ModelSizes
        # A parameter: its elements, the bytes of each, and whether it has a gradient.
        Size = Struct.new(:count, :each, :trained, :dtype) do
          def bytes
            count * each
          end
        end

        # Parameters that are gathered together. `reshard`: nil unless somewhere it is said; `ranks`: nil unless it is divided
        # already; `precision`: a policy, or nil.
        Unit = Struct.new(:name, :sizes, :reshard, :ranks, :precision, keyword_init: true) do
          def each_bytes
            sizes.map(&:each).max
          end

          def trained?
            sizes.any?(&:trained)
          end

          def trained_count
            sizes.select(&:trained).sum(&:count)
          end
        end

        # @return [Array<Unit>] in the order in which forward comes to them
        attr_reader :units

        # @return [Unit, nil] that of the model itself, whose forward has those of the others within it
        attr_reader :root

        # @return [Array<Boolean>] whether the model itself has parameters before those of the other units, as an embedding; and
        #   after them, as a head
        attr_reader :around

        # @return [Array<Size>] of parameters in no unit, as `ignored_params`
        attr_reader :others

        # @return [Integer]
        attr_reader :buffer_bytes

        # @param model [Torch::NN::Module]
        def initialize(model)
          @model = model
          @taken = {}.compare_by_identity
          buffers = model.modules.to_a.flat_map { |each| each.named_buffers.values }.grep(Torch::Tensor).uniq(&:object_id)
          @buffer_bytes = buffers.sum { |each| each.numel * each.element_size }
          @sharded = model.modules.any? { |each| each.is_a?(FSDP::FSDPModule) }
          @sharded ? read_units : guess_units
          @around = find_around
        end

        # @return [Boolean] whether it is made of units already
        def sharded?
          @sharded
        end

        # @return [Array<Size>] each parameter once
        def sizes
          units.flat_map(&:sizes) + others
        end

        # @return [Integer] elements
        def count
          sizes.sum(&:count)
        end

        private

        # The model itself is sharded last, and runs first.
        def read_units
          units = FSDP.units_of(@model).first.state.units.reject { |unit| unit.parameters.empty? }
          read = units.to_h { |unit| [unit, read_unit(unit)] }
          outer = @model.is_a?(FSDP::FullyShardedDataParallel) ? @model.module : @model
          @root = read[outer.send(:unit)] if outer.is_a?(FSDP::FSDPModule)
          @units = [@root, *read.values].compact.uniq(&:object_id)
          @others = take(@model)
        end

        def read_unit(unit)
          sizes = unit.to_enum(:each_piece).map { |_, parameter, _, _, shape| size_of(parameter, shape.inject(1, :*)) }
          Unit.new(name: unit.names.first, sizes: sizes, reshard: unit.reshard_after_forward, ranks: unit.group&.size || 1, precision: unit.precision)
        end

        # As one would shard it: each layer, then the model itself.
        def guess_units
          layers = Torch::Utils::Checkpoint::Layers.of(@model).map { |name, layer| Unit.new(name: name, sizes: take(layer)) }
          rest = take(@model)
          @root = Unit.new(name: "", sizes: rest) unless rest.empty?
          @units = [@root, *layers].compact.reject { |unit| unit.sizes.empty? }
          @others = []
        end

        # A parameter belongs to the first module that has it, and counts once.
        def take(mod)
          mod.parameters.reject { |each| @taken[each] }.uniq(&:object_id).map { |each| size_of(each, each.numel) }
        end

        def size_of(parameter, count)
          @taken[parameter] = Size.new(count, parameter.element_size, parameter.requires_grad, parameter.dtype)
        end

        # By the order in which the model lists its parameters, which is mostly that in which it uses them.
        def find_around
          own = @model.parameters.map { |each| @root&.sizes&.any? { |size| size.equal?(@taken[each]) } }
          [own.first && true, own.last && true].map { |each| each || false }
        end
      end
      private_constant :ModelSizes
    end
  end
end
