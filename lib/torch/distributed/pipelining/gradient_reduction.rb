# frozen_string_literal: true

module Torch
  module Distributed
    module Pipelining
      # When the gradients of a stage that is replicated or sharded are reduced: once a step. Until then they are added up.
      #
      # @api private
      class GradientReduction
        # @param stage [PipelineStage]
        # @param split [Boolean] whether the step's backwards are split
        def initialize(stage, split)
          @module = stage.submodule
          @split = split
          # Nothing is replicated or sharded before the files are loaded.
          parallel = Torch::NN::Parallel.autoload?(:DistributedDataParallel) ? nil : Torch::NN::Parallel::DistributedDataParallel
          sharded = Distributed.autoload?(:FSDP) ? nil : FSDP::FSDPModule
          modules = (parallel || sharded) ? @module.modules : []
          @replicated = parallel ? modules.grep(parallel) : []
          @sharded = sharded ? modules.grep(sharded) : []
        end

        # @raise [UnsupportedError] if they can't be reduced once a step
        def check
          @replicated.each(&:_check_for_pipeline)
        end

        # Around the forward of a micro-batch: gradients are not averaged by the next backward, which is that of another one.
        def held_back(&block)
          @replicated.inject(block) { |inner, each| -> { each.no_sync(&inner) } }.call
        end

        # @return [Boolean] whether weights' gradients may be computed apart from those of inputs: a sharded parameter is
        #   there in backward only
        def splits?
          @split && @sharded.empty?
        end

        # @param last [Boolean] whether it is the stage's last one in this step
        def before_backward(last)
          @sharded.each { |mod| mod.set_requires_gradient_sync(last, recurse: false) }
          open_round if last && !@split
        end

        # After all backwards of a step: where they are split, none of them has all gradients, so one that adds zeros reduces them.
        def finish
          return if @replicated.empty? || !@split

          open_round
          parameters = @module.parameters.uniq(&:object_id).select(&:requires_grad)
          zeros = parameters.map { |each| Torch.zeros(1, dtype: each.dtype, device: each.device).expand(each.shape) }
          Distributed.send(:_backward, parameters, zeros)
        end

        private

        def open_round
          @replicated.each(&:_average_next_backward)
        end
      end
    end
  end
end
