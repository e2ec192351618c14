# frozen_string_literal: true

require "torch"
require "torch_ddp/ext"

module Torch
  module NN
    # torch-rb's module of helpers, with PyTorch's functions on gradients as methods of its own. Those that torch-rb has
    # itself stay torch-rb's.
    module Utils
      # The functions, which are called on {Utils}: `Torch::NN::Utils.clip_grad_norm_(model.parameters, 1.0)`.
      module GradientClipping
        # Scales the gradients of all parameters in place so that their norm, as if they were one vector, is at most
        # `max_norm`. Call it between `backward` and the optimizer's step.
        #
        # Each element counts once: of parameters that layouts or FSDP divide the norm is that of all ranks' parts, and those that all
        # ranks have are counted by one. It is a collective call then. Where each rank holds other parameters, as stages of a pipeline
        # do, or other parts of them, `process_group` says among whom the whole is shared; that is a collective call also for a rank
        # without gradients. Replicated parameters, as DistributedDataParallel has them, need none. Each rank scales what it has.
        #
        #   Torch::NN::Utils.clip_grad_norm_(model.parameters, 1.0)
        #   Torch::NN::Utils.clip_grad_norm_(stage.parameters, 1.0, process_group: mesh["pp"].get_group)
        #
        # @param parameters [Torch::Tensor, Enumerable<Torch::Tensor>] those without a gradient are passed over
        # @param max_norm [Numeric]
        # @param norm_type [Numeric] the norm's order; Float::INFINITY for the largest absolute value
        # @param error_if_nonfinite [Boolean] whether a norm that is infinite or not a number is an error, on all ranks
        # @param foreach [Object] for PyTorch's sake: it is always one call
        # @param process_group [Torch::Distributed::ProcessGroup, Array<Torch::Distributed::ProcessGroup>, nil] of ranks that hold others
        # @param uncounted [Enumerable<Torch::Tensor>] parameters that another rank of `process_group` has as well and counts, such as a
        #   weight that two stages share: they are scaled, but not part of this rank's norm
        # @return [Torch::Tensor] the norm before, of no dimensions
        # @raise [Torch::Distributed::InvalidArgumentError]
        def clip_grad_norm_(parameters, max_norm, norm_type: 2.0, error_if_nonfinite: false, foreach: nil, process_group: nil,
          uncounted: [])
          list = GradientClipping.list(parameters)
          divisions = DividedNorm.new(list, process_group, uncounted)
          max_norm = Float(max_norm)
          order = GradientClipping.order(norm_type)
          if divisions.simple?
            norm = GradientClipping.call(:_clip_grad_norm, list, max_norm, order, error_if_nonfinite, divisions.group)
          else
            norm = divisions.norm(order, &:grad)
            GradientClipping.check_finite(norm, order, max_norm) if error_if_nonfinite
            GradientClipping.call(:_scale_gradients, list, max_norm, norm)
          end
          GradientClipping.tensor(norm, list)
        end

        alias_method :clip_grad_norm!, :clip_grad_norm_

        # The norm of all these tensors, as if they were one vector. Parameters that ranks divide count as in {#clip_grad_norm_}; of
        # gradients it is not known which ranks divide: what {#clip_grad_norm_} returns is their norm.
        #
        # @param tensors [Torch::Tensor, Enumerable<Torch::Tensor>] gradients for instance
        # @param norm_type (see #clip_grad_norm_)
        # @param error_if_nonfinite (see #clip_grad_norm_)
        # @param foreach (see #clip_grad_norm_)
        # @param process_group (see #clip_grad_norm_)
        # @return [Torch::Tensor] of no dimensions
        def get_total_norm(tensors, norm_type: 2.0, error_if_nonfinite: false, foreach: nil, process_group: nil)
          list = GradientClipping.list(tensors)
          divisions = DividedNorm.new(list, process_group, [])
          order = GradientClipping.order(norm_type)
          norm = if divisions.simple?
            GradientClipping.call(:_total_norm, list, order, divisions.group)
          else
            divisions.norm(order) { |tensor| tensor }
          end
          if error_if_nonfinite && !norm.finite?
            raise Torch::Distributed::InvalidArgumentError, "the tensors' norm of order #{norm_type} is #{norm}: look for what " \
              "made it, or pass error_if_nonfinite: false"
          end

          GradientClipping.tensor(norm, list)
        end

        # Scales gradients as {#clip_grad_norm_} does, by a norm that is known: of {#get_total_norm} for instance.
        #
        # @param parameters (see #clip_grad_norm_)
        # @param max_norm (see #clip_grad_norm_)
        # @param total_norm [Torch::Tensor, Numeric]
        # @param foreach (see #clip_grad_norm_)
        # @return [void]
        def clip_grads_with_norm_(parameters, max_norm, total_norm, foreach: nil)
          total_norm = total_norm.item if total_norm.is_a?(Torch::Tensor)
          GradientClipping.call(:_scale_gradients, GradientClipping.list(parameters), Float(max_norm), Float(total_norm))
          nil
        end
        alias_method :clip_grads_with_norm!, :clip_grads_with_norm_

        # Brings each number of all gradients into the range from `-clip_value` to `clip_value`, in place.
        #
        # @param parameters (see #clip_grad_norm_)
        # @param clip_value [Numeric]
        # @param foreach (see #clip_grad_norm_)
        # @return [void]
        def clip_grad_value_(parameters, clip_value, foreach: nil)
          GradientClipping.call(:_clip_grad_value, GradientClipping.list(parameters), Float(clip_value))
          nil
        end
        alias_method :clip_grad_value!, :clip_grad_value_

        class << self
          # @api private
          def list(tensors)
            tensors.is_a?(Torch::Tensor) ? [tensors] : tensors.to_a.dup
          end

          # @api private
          def order(norm_type)
            return Float::INFINITY if norm_type.to_s == "inf"

            Float(norm_type)
          end

          # @api private
          def check_finite(norm, order, max_norm)
            return if norm.finite?

            order, norm, max_norm = [order, norm, max_norm].map { |number| format("%g", number).downcase }
            raise Torch::Distributed::InvalidArgumentError, "the gradients' norm of order #{order} is #{norm}, so they cannot be clipped to " \
              "#{max_norm}: find its cause, or pass error_if_nonfinite: false to scale by it nevertheless"
          end

          # The norm in the precision of what it is the norm of; a look at one of them must do, for each look costs more
          # than that tensor's norm.
          #
          # @api private
          def tensor(norm, tensors)
            Torch.tensor(norm, dtype: (tensors.first&.dtype == :float64) ? :float64 : :float32)
          end

          # @api private
          def call(name, *arguments)
            Torch::Distributed.send(name, *arguments)
          end
        end
      end

      require_relative "divided_norm"
      extend GradientClipping # torch-rb's own methods come first
    end
  end
end
