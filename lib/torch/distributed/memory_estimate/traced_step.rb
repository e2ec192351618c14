# frozen_string_literal: true

require_relative "../../utils/checkpoint"

module Torch
  module Distributed
    class MemoryEstimate
      # What forward and backward of a model take besides its parameters and gradients: measured, by doing so. Gradients,
      # buffers and random numbers are afterwards as they were.
      #
      # @api private
      class TracedStep
        # What autograd keeps from forward to backward; the most that there is at once, as long as no garbage is collected;
        # what is left of it after backward.
        Bytes = Struct.new(:saved, :peak, :left)

        # @param model [Torch::NN::Module]
        # @param batch [Torch::Tensor, Array]
        # @param checkpoint_ratio [Numeric, nil]
        # @param loss [#call, nil] of the model's output
        def initialize(model, batch, checkpoint_ratio, loss)
          @model = model
          @inputs = batch.is_a?(Array) ? batch : [batch]
          @ratio = checkpoint_ratio
          @loss = loss || method(:sum)
          device = model.parameters.first&.device
          @device = Distributed._device_name(device) if device
        end

        # @return [Bytes]
        def bytes
          checkpointed do
            restoring do
              run # gradients are there from now on, as in all steps but the first
              saved = saved_bytes
              left = nil
              peak = Measured.peak(@device) { left = left_after_run }
              Bytes.new(saved, peak, left)
            end
          end
        end

        private

        def saved_bytes
          loss = nil
          saved = Measured.held(@device) { loss = forward }
          loss.backward
          saved
        end

        def run
          forward.backward
        end

        def left_after_run
          before = Measured.current(@device)
          run
          Measured.current(@device) - before
        end

        def forward
          loss = @loss.call(@model.call(*@inputs))
          unless loss.is_a?(Torch::Tensor) && loss.numel == 1 && loss.requires_grad
            raise ArgumentError, "batch: expected a loss of one element that requires a gradient, got #{loss.inspect}"
          end

          loss
        end

        # A loss that takes next to no memory.
        def sum(output)
          tensors = Nested.tensors(output).select(&:requires_grad)
          raise ArgumentError, "batch: expected the model's output to require a gradient, it is #{output.class}" if tensors.empty?

          tensors.map(&:sum).reduce(:+)
        end

        def checkpointed
          return yield unless @ratio

          wrapper = Torch::Utils::Checkpoint::SelectiveCheckpointing.new(@model, ratio: @ratio)
          begin
            yield
          ensure
            wrapper.disable
          end
        end

        def restoring
          parameters = @model.parameters.uniq(&:object_id)
          gradients = parameters.map { |each| each.grad&.detach&.clone }
          buffers = @model.modules.to_a.flat_map { |each| each.named_buffers.values }.grep(Torch::Tensor).uniq(&:object_id)
          values = buffers.map(&:clone)
          Distributed.fork_rng { yield }
        ensure
          restore(buffers, values)
          kept, none = parameters.zip(gradients).partition(&:last)
          restore(kept.map { |each, _| each.grad }, kept.map(&:last))
          Optim::Fused.instance_method(:_zero_grad).bind_call(self, [{params: none.map(&:first)}], true)
        end

        def restore(tensors, values)
          Torch.no_grad { tensors.zip(values) { |tensor, value| tensor.copy!(value) } }
        end
      end
      private_constant :TracedStep
    end
  end
end
