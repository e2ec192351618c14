# frozen_string_literal: true

module Torch
  module Distributed
    module Algorithms
      module DDPCommHooks
        # A hook of libtddp, created once the model is known.
        class BuiltIn
          # @return [String]
          attr_reader :name

          # @api private
          attr_reader :state_class, :default

          # @api private
          # @param state [Class, nil] what the state has to be; nil: whatever it is, it is not looked at
          # @param default [Proc, nil] makes a state where none is given
          # @param callable [Boolean] whether {#call} is of use
          # @yieldparam state [Object] of that class
          # @yieldparam rounds [Integer] how many backward passes there were before
          # @yieldparam group [ProcessGroup, nil] the model's, where it is on devices
          # @yieldreturn [CommHook]
          def initialize(name, state: nil, default: nil, dtype: nil, callable: false, &make)
            @name = name
            @state_class = state
            @default = default
            @dtype = dtype
            @callable = callable || !dtype.nil?
            @make = make
          end

          # @api private
          # @return [Object] the state that {#build} takes
          # @raise [ArgumentError]
          def state_for(given)
            return given if @state_class.nil? || given.is_a?(@state_class)
            return @default.call if given.nil? && @default

            raise ArgumentError, "state: expected a #{@state_class.name} for #{@name}, got #{given.inspect}"
          end

          # @api private
          # @return [CommHook]
          def build(state, rounds, group = nil)
            @make.call(state_for(state), rounds, group)
          end

          # For hooks in Ruby that do something before or after: averages the bucket as it is or in a smaller dtype.
          #
          # @param state [ProcessGroup, nil] the group; nil: the default one
          # @param bucket [GradBucket]
          # @return [Future] of a tensor
          def call(state, bucket)
            unless @callable
              raise ArgumentError, "#{@name}: expected to be registered, register_comm_hook(hook, state:): it cannot be called for one bucket"
            end
            return Future.of(bucket.buffer) if @name == "noop"

            group = Distributed.send(:group_or_default, state)
            buffer = bucket.buffer
            sent = @dtype ? buffer.to(dtype: @dtype).div!(group.size) : buffer.div!(group.size)
            Distributed.all_reduce(sent, group: group, async_op: true).get_future.then do
              @dtype ? buffer.copy!(sent) : buffer
            end
          end

          # @return [String]
          def inspect
            "#<#{self.class.name} #{@name}>"
          end
        end
      end
    end
  end
end
