# frozen_string_literal: true

require "torch/distributed"
require_relative "ddp_comm_hooks/built_in"
require_relative "ddp_comm_hooks/power_sgd"
require_relative "ddp_comm_hooks/states"

module Torch
  module Distributed
    module Algorithms
      # Communication hooks for `DistributedDataParallel#register_comm_hook`, with PyTorch's names. They run in libtddp, beside
      # backward.
      #
      #   model.register_comm_hook(DDPCommHooks.fp16_compress_hook)
      #   model.register_comm_hook(DDPCommHooks.power_sgd_hook, state: PowerSGDState.new(matrix_approximation_rank: 2))
      #   model.register_comm_hook(DDPCommHooks.bf16_compress_wrapper(DDPCommHooks.power_sgd_hook), state: state)
      #
      # The same by name, `model.register_comm_hook(:fp16_compress)`, is for all that {NAMES} has. Models on GPUs take all but those
      # that quantize, which compute on the CPU. PowerSGD runs there once backward has returned, as hooks in Ruby do, rather than
      # beside it.
      module DDPCommHooks
        # What `register_comm_hook` takes by name.
        NAMES = %i[allreduce fp16_compress bf16_compress quantize_per_tensor quantize_per_channel power_sgd power_sgd_rank2
          batched_power_sgd batched_power_sgd_rank2 noop].freeze

        class << self
          # The average, as without a hook.
          # @return [BuiltIn]
          def allreduce_hook
            BuiltIn.new("allreduce", callable: true) { CommHook.allreduce }
          end

          # Sends gradients as float16: half of float32's bytes.
          # @return [BuiltIn]
          def fp16_compress_hook
            BuiltIn.new("fp16_compress", dtype: :float16) { CommHook.compress(:float16, nil) }
          end

          # Sends gradients as bfloat16: half of float32's bytes, and its range.
          # @return [BuiltIn]
          def bf16_compress_hook
            BuiltIn.new("bf16_compress", dtype: :bfloat16) { CommHook.compress(:bfloat16, nil) }
          end

          # Sends a byte for each element, with one scale for a bucket.
          # @return [BuiltIn]
          def quantization_pertensor_hook
            BuiltIn.new("quantize_per_tensor") { CommHook.quantize(false, QUANTIZED_TOGETHER) }
          end
          alias_method :quantize_per_tensor_hook, :quantization_pertensor_hook

          # Sends a byte for each element, with a scale for each 512 of them.
          #
          # @param bucket_size [Integer] how many elements share a scale
          # @return [BuiltIn]
          def quantization_perchannel_hook(bucket_size: QUANTIZED_TOGETHER)
            unless bucket_size.is_a?(Integer) && bucket_size.positive?
              raise ArgumentError, "bucket_size: expected a positive Integer, got #{bucket_size.inspect}"
            end

            BuiltIn.new("quantize_per_channel") { CommHook.quantize(true, bucket_size) }
          end
          alias_method :quantize_per_channel_hook, :quantization_perchannel_hook

          # Sends each gradient's matrix as two thin ones. Its state is a {PowerSGDState}; nil is one of rank 1.
          # @return [BuiltIn]
          def power_sgd_hook
            power_sgd("power_sgd", batched: false)
          end
          alias_method :powerSGD_hook, :power_sgd_hook

          # The same for each bucket as one matrix: fewer operations, less exact.
          # @return [BuiltIn]
          def batched_power_sgd_hook
            power_sgd("batched_power_sgd", batched: true)
          end
          alias_method :batched_powerSGD_hook, :batched_power_sgd_hook

          # Leaves each process its own gradients and sends nothing: to see what communication costs.
          # @return [BuiltIn]
          def noop_hook
            BuiltIn.new("noop", callable: true) { CommHook.noop }
          end

          # Averages over all processes at first, later over some of them. Its state is a {PostLocalSGDState}.
          # @return [BuiltIn]
          def post_local_sgd_hook
            BuiltIn.new("post_local_sgd", state: PostLocalSGDState) { |state, rounds| state._hook(rounds) }
          end
          alias_method :post_localSGD_hook, :post_local_sgd_hook

          # Has `hook` work on gradients in float16.
          #
          # @param hook [BuiltIn, CommHook] one that runs in libtddp
          # @return [BuiltIn]
          def fp16_compress_wrapper(hook)
            wrapper("fp16_compress_wrapper", :float16, hook)
          end

          # Has `hook` work on gradients in bfloat16.
          #
          # @param hook [BuiltIn, CommHook] one that runs in libtddp
          # @return [BuiltIn]
          def bf16_compress_wrapper(hook)
            wrapper("bf16_compress_wrapper", :bfloat16, hook)
          end

          # @param name [Symbol, String] one of {NAMES}
          # @return [BuiltIn]
          # @raise [ArgumentError]
          def fetch(name)
            case name.to_sym
            when :allreduce then allreduce_hook
            when :fp16_compress then fp16_compress_hook
            when :bf16_compress then bf16_compress_hook
            when :quantize_per_tensor then quantization_pertensor_hook
            when :quantize_per_channel then quantization_perchannel_hook
            when :power_sgd then power_sgd_hook
            when :power_sgd_rank2 then power_sgd("power_sgd_rank2", batched: false, rank: 2)
            when :batched_power_sgd then batched_power_sgd_hook
            when :batched_power_sgd_rank2 then power_sgd("batched_power_sgd_rank2", batched: true, rank: 2)
            when :noop then noop_hook
            else raise ArgumentError, "hook: expected one of #{NAMES.map(&:inspect).join(", ")}, got #{name.inspect}"
            end
          end

          private

          def power_sgd(name, batched:, rank: nil)
            BuiltIn.new(name, state: PowerSGDState, default: -> { PowerSGDState.new(matrix_approximation_rank: rank || 1) }) do |state, rounds, group|
              state._hook(batched, rounds, group)
            end
          end

          def wrapper(name, dtype, hook)
            case hook
            when CommHook then BuiltIn.new("#{name}(#{hook.name})") { CommHook.compress(dtype, hook) }
            when BuiltIn
              BuiltIn.new("#{name}(#{hook.name})", state: hook.state_class, default: hook.default) do |state, rounds, group|
                CommHook.compress(dtype, hook.build(state, rounds, group))
              end
            else
              raise ArgumentError, "hook: expected a hook of DDPCommHooks, got #{hook.inspect}: one in Ruby casts its bucket by itself"
            end
          end
        end

        # PyTorch's number of elements that share a scale.
        QUANTIZED_TOGETHER = 512
        private_constant :QUANTIZED_TOGETHER
      end
    end
  end
end
