# frozen_string_literal: true

module Torch
  module Distributed
    module Pipelining
      # When the gradients of a stage that is replicated or sharded are reduced: once a step. Until then they are added up.
      #
      # @api private
      class GradientReduction
        class << self
          # Around the forward of a micro-batch: gradients are not averaged by the next backward, which is that of another one.
          def held_back(mod, &block)
            replicated(mod).inject(block) { |inner, each| -> { each.no_sync(&inner) } }.call
          end

          # @return [Array<Torch::NN::Parallel::DistributedDataParallel>]
          def replicated(mod)
            mod.modules.grep(Torch::NN::Parallel::DistributedDataParallel)
          end
        end

        # @param stage [PipelineStage]
        # @param split [Boolean] whether the step's backwards are split
        def initialize(stage, split)
          mod = stage.submodule
          @replicated = GradientReduction.replicated(mod)
          # Nobody has sharded anything before the file is loaded.
          @sharded = Distributed.autoload?(:FSDP) ? [] : mod.modules.grep(FSDP::FSDPModule)
          @split = split
          @parameters = mod.parameters.uniq(&:object_id).select(&:requires_grad)
        end

        # @return [Boolean] whether weights' gradients may be computed apart from those of inputs: a sharded parameter is
        #   there in backward only
        def splits?
          @split && @sharded.empty?
        end

        # @param last [Boolean] whether it is the stage's last one in this step
        def before_backward(last)
          @sharded.each { |mod| mod.set_requires_gradient_sync(last) }
          open_round if last && !@split
        end

        # After all backwards of a step: where they are split, none of them has all gradients, so one that adds zeros reduces them.
        def finish
          return if @replicated.empty? || !@split

          open_round
          zeros = @parameters.map { |each| Torch.zeros(1, dtype: each.dtype, device: each.device).expand(each.shape) }
          Distributed.send(:_backward, @parameters, zeros)
        end

        private

        def open_round
          @replicated.each(&:_average_next_backward)
        end
      end
    end
  end
end
