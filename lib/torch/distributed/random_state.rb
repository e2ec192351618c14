# frozen_string_literal: true

module Torch
  module Distributed
    # The state of libtorch's random numbers on the CPU, from which dropout, `Torch.randn` and the like draw. Ruby's own
    # (`rand`, `Random`) is another and not part of it.
    module RandomState
      # @return [Torch::Tensor] bytes that {#set_rng_state} of a process with the same libtorch takes
      def get_rng_state # standard:disable Naming/AccessorMethodName
        bytes = _rng_state
        _set_bytes(Torch.empty([bytes.bytesize], dtype: :uint8), bytes)
      end
      alias_method :rng_state, :get_rng_state

      # @param state [Torch::Tensor] what {#get_rng_state} gave
      # @raise [InvalidArgumentError] if it is none; the random numbers are as they were
      def set_rng_state(state) # standard:disable Naming/AccessorMethodName
        unless state.is_a?(Torch::Tensor) && state.dtype == :uint8
          raise TypeError, "state: expected a Torch::Tensor of uint8, got #{state.is_a?(Torch::Tensor) ? state.dtype : state.class}"
        end

        _set_rng_state(_bytes(Torch.no_grad { state.cpu.contiguous }))
        nil
      end
      alias_method :rng_state=, :set_rng_state

      # Runs the block and then goes on with the random numbers where they were before it.
      #
      # @return [Object] the block's value
      def fork_rng
        before = _rng_state
        yield
      ensure
        _set_rng_state(before) if before
      end
    end
  end

  # As PyTorch names them, unless torch-rb has them.
  %i[get_rng_state set_rng_state].each do |name|
    next if respond_to?(name)

    define_singleton_method(name) { |*arguments| Distributed.public_send(name, *arguments) }
  end
end
