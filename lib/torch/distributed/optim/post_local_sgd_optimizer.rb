# frozen_string_literal: true

require "torch/distributed"

module Torch
  module Distributed
    module Optim
      # An optimizer whose steps are followed by averaging the models when its averager says so.
      #
      #   model.register_comm_hook(DDPCommHooks.post_local_sgd_hook, state: PostLocalSGDState.new(start_local_sgd_iter: 100))
      #   averager = PeriodicModelAverager.new(period: 4, warmup_steps: 100)
      #   optimizer = PostLocalSGDOptimizer.new(Torch::Optim::SGD.new(model.parameters, lr: 0.1), averager)
      #
      # Its state_dict holds the averager's count beside the optimizer's own state.
      class PostLocalSGDOptimizer < Torch::Optim::Optimizer
        # @return [Torch::Optim::Optimizer] the one that takes the steps
        attr_reader :optim

        # @return [Algorithms::ModelAveraging::ModelAverager]
        attr_reader :averager

        # @param optim [Torch::Optim::Optimizer]
        # @param averager [Algorithms::ModelAveraging::ModelAverager]
        def initialize(optim, averager) # rubocop:disable Lint/MissingSuper
          unless optim.is_a?(Torch::Optim::Optimizer)
            raise ArgumentError, "optim: expected a Torch::Optim::Optimizer, got #{optim.inspect} (#{optim.class})"
          end
          unless averager.is_a?(Algorithms::ModelAveraging::ModelAverager)
            raise ArgumentError, "averager: expected a ModelAverager such as PeriodicModelAverager, got #{averager.inspect} (#{averager.class})"
          end

          @optim = optim
          @averager = averager
        end

        # @return [Array<Hash>] the optimizer's
        def param_groups
          @optim.param_groups
        end

        # @param param_group [Hash] for the optimizer
        def add_param_group(param_group)
          @optim.add_param_group(param_group)
        end

        # A collective call, whenever models are averaged.
        #
        # @return [Object, nil] what the closure gave
        def step(closure = nil)
          loss = closure ? @optim.step(closure) : @optim.step
          @averager.average_parameters(param_groups)
          loss
        end

        # As the optimizer's.
        def zero_grad(...)
          @optim.zero_grad(...)
        end

        # @return [Hash] the optimizer's, and the averager's count as "step"
        def state_dict
          @optim.state_dict.merge("step" => @averager.step)
        end

        # @param state_dict [Hash] what {#state_dict} gave; without "step" the averager counts from 0, as one does who
        #   goes on from an optimizer of another kind
        def load_state_dict(state_dict)
          count = state_dict["step"]
          @optim.load_state_dict(state_dict.except("step"))
          Distributed._warn "state_dict: there is no \"step\", so the averager counts from 0" if count.nil?
          @averager.step = count || 0
          nil
        end

        # @return [String]
        def inspect
          "#<#{self.class.name} #{@optim.class.name}, #{@averager.class.name} at step #{@averager.step}>"
        end
      end
    end
  end
end
