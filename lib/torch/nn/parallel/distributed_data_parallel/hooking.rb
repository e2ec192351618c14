# frozen_string_literal: true

require "torch/distributed/algorithms/ddp_comm_hooks"

module Torch
  module NN
    module Parallel
      class DistributedDataParallel < Module
        # Registers communication hooks, which process buckets instead of averaging them.
        #
        # @api private
        module Hooking
          # A hook that was registered: its name, and what makes it, given how many rounds there were with others, the
          # parameters by number, and the group if they are on devices.
          Registered = Struct.new(:name, :make)
          private_constant :Registered

          class << self
            # What a hook may give beside a tensor: a future of one, or of an operation's results.
            def result(given)
              case given
              when Torch::Distributed::Future then given.then { |future| single(future.value) }
              when Torch::Distributed::Work then given.get_future.then { |future| single(future.value) }
              else single(given)
              end
            end

            private

            def single(value)
              value = value.first if value.is_a?(Array) && value.size == 1
              return value if value.is_a?(Torch::Tensor)

              raise TypeError, "communication hook: expected a Torch::Tensor, a Future or a Work, got #{value.inspect} (#{value.class})"
            end
          end

          private

          # A single positional argument is the hook, unless a keyword or a block gives that.
          #
          # @return [Array(Object, Object)] the state and the hook
          def comm_hook_arguments(positional, state, hook, block)
            raise ArgumentError, "register_comm_hook: expected a hook and its state, got #{positional.size} arguments" if positional.size > 2
            raise ArgumentError, "hook: expected an argument or a block, got both" if block && (hook || positional.size == 2)

            hook ||= block
            return [state, hook || positional.first] if positional.empty? || (positional.size == 1 && hook.nil?)

            given = [("state" unless state.nil?), ("hook" if hook && positional.size == 2)].compact
            raise ArgumentError, "#{given.first}: expected it once, got it as a keyword and without one" unless given.empty?

            [positional.first, hook || positional.last]
          end

          # @return [Registered]
          def hook_of(state, hook)
            hooks = Torch::Distributed::Algorithms::DDPCommHooks
            case hook
            when Symbol, String then hook_of(state, hooks.fetch(hook))
            when hooks::BuiltIn
              state = hook.state_for(state)
              Registered.new(hook.name, ->(rounds, _, group) { hook.build(state, rounds, group) })
            when Torch::Distributed::CommHook then Registered.new(hook.name, ->(*) { hook })
            else ruby_hook(state, hook)
            end
          end

          def ruby_hook(state, hook)
            unless hook.respond_to?(:call)
              raise ArgumentError, "hook: expected a name such as :fp16_compress, a hook of DDPCommHooks, a CommHook, or what can be called with " \
                "a state and a bucket, got #{hook.inspect}"
            end

            Registered.new("a hook in Ruby", lambda do |_, parameters, _|
              Torch::Distributed::CommHook.ruby(->(bucket) { Hooking.result(hook.call(state, bucket._of(parameters))) })
            end)
          end

          # @param registered [Registered]
          def install_hook(registered, parameters)
            @core.comm_hook = registered.make.call(@rounds, parameters, @core.on_devices? ? @process_group : nil)
            AfterBackward.install if @core.hook_after_backward?
          end

          # What sends gradients in a smaller dtype, where mixed precision asks for that.
          #
          # @return [Registered, nil]
          def compressing_hook(found)
            dtype = @arguments.mixed_precision&.compress
            return unless dtype && found.trained.any? { |parameter| parameter.dtype != dtype }

            hook_of(nil, (dtype == :float16) ? :fp16_compress : :bf16_compress)
          end
        end
        private_constant :Hooking
      end
    end
  end
end
