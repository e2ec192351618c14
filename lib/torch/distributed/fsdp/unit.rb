# frozen_string_literal: true

module Torch
  module Distributed
    module FSDP
      # Modules whose parameters are gathered and freed together.
      #
      # @api private
      class Unit
        UNIT = :@_fsdp_unit
        private_constant :UNIT

        # What Torch::Utils::Checkpoint has around a segment's second run: the units whose forward it is of, some of which
        # may be freed by then.
        Recomputed = Struct.new(:unit, :outer) do
          def during(&run)
            unit.recompute
            outer ? outer.during(&run) : yield
          end
        end
        Recomputed::KEY = :torch_ddp_surroundings
        private_constant :Recomputed

        # @return [State]
        attr_reader :state

        # @return [ProcessGroup, nil] whose processes hold a shard each; nil: the unit is not divided
        attr_reader :group

        # @return [MixedPrecisionPolicy]
        attr_reader :precision

        class << self
          # @return [Unit, nil] that of a module
          def of(mod)
            mod.instance_variable_get(UNIT)
          end

          # @return [Unit, nil] that which shards a parameter
          def owner(parameter)
            @owners[parameter]
          end

          # The ranks of a group make its units in the same order, and compare these numbers with each operation.
          #
          # @return [Integer] of the next unit of a group
          def next_of(group)
            @counts[group.name] += 1
          end

          # @api private
          def own(parameter, unit)
            @owners[parameter] = unit
          end
        end
        @owners = ObjectSpace::WeakMap.new
        @counts = Hash.new(-1)

        def initialize(state, modules, parameters, groups, name:, reshard:, precision:, offload:)
          @state = state
          @modules = modules
          @parameters = parameters
          @group = groups.first
          @precision = precision
          @reshard = reshard
          @offload = offload
          @sync = true
          shapes = parameters.list.map(&:shape)
          @number = add("#{name || modules.map { |each| each.class.name }.join(", ")} (unit #{Unit.next_of(groups.compact.first)})", groups)
          parameters.list.zip(shapes) do |parameter, shape|
            Unit.own(parameter, self)
            ShardedParameter.adopt(parameter, shape)
          end
          parameters.owners.each { |mod, owner| ForwardMethods.guard(mod, owner) }
          modules.each do |mod|
            mod.instance_variable_set(UNIT, self)
            ModuleHooks.around(mod, "fully_shard") { |inputs, kwargs, forward| run(inputs, kwargs, forward) }
          end
        end

        # @return [Integer, nil] its number in the model; nil: it has no parameter of its own
        attr_reader :number

        # @return [Array<Torch::NN::Parameter>]
        def parameters
          @parameters.list
        end

        def names
          @parameters.names
        end

        # @return [Boolean] whether its parameters are not gathered now
        def hidden?
          @number ? @state.model.hidden?(@number) : false
        end

        # The unit is one of another state from now on.
        def join(state, number)
          @state = state
          @number = number
          @numbers = nil
        end

        # Backward needs the model itself first, so it is not worth freeing it before.
        def become_root
          @state.model.set_reshard(@number, false) if @number && @reshard.nil?
        end

        # @return [Boolean, nil] nil: unless it is the model itself
        def reshard_after_forward
          @reshard
        end

        def reshard_after_forward=(value)
          @reshard = value
          @state.model.set_reshard(@number, value) if @number
        end

        def unshard
          @state.model.unshard(@number) if @number
        end

        def reshard
          @state.model.reshard(@number) if @number
        end

        # Whether its gradients are reduced by the backwards that follow.
        #
        # @return [Boolean]
        attr_reader :sync

        def sync=(value)
          @sync = value
          @state.model.set_sync(@number, value) if @number
        end

        # Gathers the parameters in their own dtype. A collective call.
        #
        # @return [Torch::Tensor, nil] flat; nil: the unit has none
        def gather
          return unless @number

          shard = @state.model.shard(@number)
          return shard.clone unless @group

          flat = Torch.empty(shard.numel * @group.size, dtype: shard.dtype, device: shard.device)
          Distributed.all_gather_into_tensor(flat, shard, group: @group)
          flat
        end

        # The parameters are whole within the block.
        #
        # @param write [Boolean] whether what the block writes to them is kept
        def summon(write)
          return yield unless @number

          @state.model.show(@number, gather)
          begin
            yield
          ensure
            @state.model.hide(@number, write)
          end
        end

        # @yieldparam name [String]
        # @yieldparam parameter [Torch::NN::Parameter]
        # @yieldparam offset [Integer] in what {#gather} returns
        # @yieldparam start [Integer] of this process's piece
        # @yieldparam shape [Array<Integer>]
        # @yieldparam count [Integer] how many elements this process's piece has
        def each_piece
          parameters.each_with_index do |parameter, i|
            offset, start, count, shape = @state.model.piece(@number, i)
            yield names[i], parameter, offset, start, shape, count
          end
        end

        # In backward, before a segment of its forward is computed again.
        def recompute
          numbers.each { |number| @state.model.recompute(number) }
        end

        # Around a forward of the modules.
        #
        # @param forward [#call] is called with (inputs, kwargs)
        # @return [Object] what it returns
        def run(inputs, kwargs, forward)
          @state.running(self) do
            inputs, kwargs = cast([inputs, kwargs], @precision.param_dtype) if @precision.cast_forward_inputs?
            @parameters.check_places
            surrounding { within(numbers, inputs, kwargs, forward) }
          end
        end

        private

        def add(name, groups)
          @state.add(self, name, groups, @parameters, gather_dtype: @precision.param_dtype, reduce_dtype: @precision.reduce_dtype,
            reshard: @reshard != false, offload: @offload.is_a?(CPUOffloadPolicy) ? @offload.pin_memory? : nil)
        end

        # Those that are gathered for this one's forward.
        def numbers
          @numbers ||= [*@parameters.lenders.map(&:number), @number].compact
        end

        # For segments of the block that are computed again in backward.
        def surrounding
          before = Thread.current[Recomputed::KEY]
          Thread.current[Recomputed::KEY] = Recomputed.new(self, before)
          yield
        ensure
          Thread.current[Recomputed::KEY] = before
        end

        # Gathers one unit after the other, and frees them in the reverse order.
        def within(left, inputs, kwargs, forward)
          return cast(forward.call(inputs, kwargs), @precision.output_dtype) if left.empty?

          number, *rest = left
          @state.model.before_forward(number)
          outputs = []
          begin
            @state.model.enter(number)
            output = within(rest, inputs, kwargs, forward)
            outputs = Nested.outputs(output, "fully_shard of a #{@modules.map(&:class).join(", ")}")
            output
          ensure
            @state.model.leave(number, outputs)
          end
        end

        def cast(value, dtype)
          return value unless dtype

          Nested.map(value) { |tensor| (tensor.floating_point? && tensor.dtype != dtype) ? tensor.to(dtype: dtype) : tensor }
        end
      end
      private_constant :Unit
    end
  end
end
