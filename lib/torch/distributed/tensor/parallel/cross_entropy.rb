# frozen_string_literal: true

module Torch
  module Distributed
    module Tensor
      module Parallel
        REDUCTIONS = %w[mean sum none].freeze
        private_constant :REDUCTIONS

        class << self
          # The cross entropy of logits that are divided along the vocabulary, which no process has all of: what {ColwiseParallel} as the
          # last layer gives. Sends three numbers for each row forwards, in two operations, and none backwards.
          #
          # @param logits [Torch::Tensor] this process's part of the classes, which are the last dimension
          # @param target [Torch::Tensor] int64 class numbers among all; of the logits' shape without the last dimension
          # @param mesh [DeviceMesh, nil] of one dimension; nil: all processes
          # @param reduction [String, Symbol] "mean", "sum" or "none"
          # @param ignore_index [Integer] the target of rows that do not count
          # @return [Torch::Tensor] the same on all processes
          # @raise [ArgumentError] for another shape or dtype, or a target that is no class
          def cross_entropy(logits, target, mesh: nil, reduction: "mean", ignore_index: -100)
            group = group_of(mesh)
            check_cross_entropy(logits, target, reduction.to_s)
            ignored = target.eq(ignore_index)
            VocabularyPart.check("target", target.masked_fill(ignored, 0), logits.shape.last * group.size)
            losses = vocabulary_losses(logits, target, group).masked_fill(ignored, 0)
            case reduction.to_s
            when "none" then losses
            when "sum" then losses.sum
            else losses.sum / ignored.logical_not.sum
            end
          end

          private

          def check_cross_entropy(logits, target, reduction)
            {logits: logits, target: target}.each { |name, tensor| Distributed.send(:check_tensor, name.to_s, tensor) }
            unless logits.dim.positive? && logits.floating_point?
              raise ArgumentError, "logits: expected a floating-point dtype and at least one dimension, got #{logits.dtype} of shape " \
                "#{logits.shape}"
            end
            unless target.dtype == :int64 && target.shape == logits.shape[0...-1]
              raise ArgumentError, "target: expected int64 of shape #{logits.shape[0...-1]}, that of the logits without the classes, got " \
                "#{target.dtype} of shape #{target.shape}"
            end
            return if REDUCTIONS.include?(reduction)

            raise ArgumentError, "reduction: expected #{REDUCTIONS.map(&:inspect).join(", ")}, got #{reduction.inspect}"
          end

          # Forward has all that the gradient is made of: less memory than a graph of the operations would keep.
          def vocabulary_losses(logits, target, group)
            rows = logits.reshape(-1, logits.shape.last)
            losses, *made = Torch.no_grad { losses_and_shares(rows, target.reshape(-1), group) }
            Distributed.send(:_cross_entropy_graph, losses, rows, group, *made) if Torch.grad_enabled? && logits.requires_grad
            losses.view(target.shape)
          end

          # The logarithm of the sum of all parts' exponentials, less the target's logit, both relative to the largest; the
          # exponentials' shares in the sum; and where in this part the targets are, and whether they are.
          def losses_and_shares(rows, target, group)
            top = rows.amax(-1)
            Distributed.all_reduce(top, op: :max, group: group) if group.size > 1
            part = VocabularyPart.new(target, rows.shape.last, group)
            picked = part.keep(rows.gather(-1, part.places.unsqueeze(-1)).squeeze(-1) - top)
            exponentials = (rows - top.unsqueeze(-1)).exp!
            both = Torch.stack([exponentials.sum(-1), picked])
            Distributed.all_reduce(both, group: group) if group.size > 1
            ones = part.keep(Torch.ones(picked.shape, dtype: rows.dtype, device: rows.device))
            [both[0].log - both[1], exponentials.div!(both[0].unsqueeze(-1)), part.places, ones]
          end
        end

        # The cross entropy of divided logits as a module.
        #
        # @see Parallel.cross_entropy
        class ParallelCrossEntropy < Torch::NN::Module
          # @see Parallel.cross_entropy for the arguments
          def initialize(mesh: nil, reduction: "mean", ignore_index: -100)
            super()
            @options = {mesh: mesh, reduction: reduction, ignore_index: ignore_index}
          end

          # @return [Torch::Tensor]
          def forward(logits, target)
            Parallel.cross_entropy(logits, target, **@options)
          end
        end
      end
    end
  end
end
