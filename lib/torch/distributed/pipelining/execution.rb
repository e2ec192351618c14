# frozen_string_literal: true

module Torch
  module Distributed
    module Pipelining
      # One step of this process: does the actions of its list, and waits for the messages that they need.
      #
      # Ruby's objects keep tensors alive until they are collected. So what a micro-batch has is released explicitly once its
      # backward has run, and what forward leaves on the way is collected by {StepMemory}.
      #
      # @api private
      class Execution
        # What is kept of a micro-batch between forward and backward.
        Kept = Struct.new(:inputs, :roots)

        # What a step gets: parts of the arguments for each micro-batch, or nil where this process has no use for them.
        Inputs = Struct.new(:args, :kwargs, :targets, :loss_fn, :weights)

        # @return [Array<Torch::Tensor>] the losses of the micro-batches, if this process has the last stage
        attr_reader :losses

        # @return [Array<Hash>] likewise what else `loss_fn` returns
        attr_reader :metrics

        # @return [Array<Array<Torch::Tensor>>] likewise the outputs
        attr_reader :outputs

        # @param stages [Hash{Integer => PipelineStage}] this process's
        # @param owner [Proc] the rank of a stage
        # @param link [Link, nil] nil: all stages are here
        # @param inputs [Inputs]
        # @param clock [Measurement]
        def initialize(stages, owner, link, inputs, clock, keep_outputs:)
          @stages = stages
          @owner = owner
          @link = link
          @inputs = inputs
          @clock = clock
          @keep_outputs = keep_outputs
          @kept = {}
          @handed = {}
          @deferred = {}
          @losses = []
          @metrics = []
          @outputs = []
        end

        # @param actions [Array<Action>] this process's
        def run(actions)
          last = actions.select(&:backward?).to_h { |action| [action.stage, action] }
          @reductions = @stages.transform_values { |stage| GradientReduction.new(stage, actions.any? { |action| action.kind == :I }) }
          actions.each do |action|
            @link&.advance(action)
            case action.kind
            when :F then forward(action)
            when :W then weights(action)
            else backward(action, last[action.stage].equal?(action))
            end
          end
          @reductions.each_value(&:finish) unless last.empty?
          @link&.finish
        end

        private

        def forward(action)
          stage = @stages.fetch(action.stage)
          i = action.micro_batch
          inputs = stage.first? ? Array(@inputs.args[i]) : take(:F, action.stage, i, action.stage - 1)
          outputs = roots = nil
          @clock.measure(action) do
            # What forward leaves on the way is garbage now, and the graph's memory at the same time.
            StepMemory.instance.segment do
              # Objects of our own, which can be released: others may know those that the module has returned.
              results = @reductions[action.stage].held_back { stage._forward(inputs, @inputs.kwargs[i]) }
              outputs = Distributed.send(:_same_tensors, results)
              roots = stage.last? ? [loss_of(outputs, i)].compact : outputs
            end
          end
          stage.last? ? keep_output(outputs) : pass_on(action, outputs)
          received = stage.first? ? [] : inputs
          return release(received, stage.last? ? [] : outputs) unless Torch.grad_enabled?

          @kept[[action.stage, i]] = Kept.new(received, roots.select(&:requires_grad))
        end

        def backward(action, last)
          stage = @stages.fetch(action.stage)
          kept = @kept.delete([action.stage, action.micro_batch])
          grads = root_grads(action, stage, kept.roots)
          @reductions[action.stage].before_backward(last)
          @clock.measure(action) { run_backward(action, kept.roots, grads) }
          inputs = kept.inputs.select(&:requires_grad)
          pass_back(action, inputs.map { |input| input.grad || Torch.zeros_like(input) }) unless stage.first?
          release(kept.inputs, kept.roots, grads)
        end

        def run_backward(action, roots, grads)
          return if roots.empty?
          return Distributed.send(:_backward, roots, grads) unless action.kind == :I && @reductions[action.stage].splits?

          @deferred[[action.stage, action.micro_batch]] = WeightGradients.defer { Distributed.send(:_backward, roots, grads) }
        end

        def weights(action)
          deferred = @deferred.delete([action.stage, action.micro_batch])
          @clock.measure(action) { deferred.run } if deferred
        end

        def root_grads(action, stage, roots)
          return take(:B, action.stage, action.micro_batch, action.stage + 1) unless stage.last?

          roots.map { |loss| Torch.full_like(loss, @inputs.weights[action.micro_batch]) }
        end

        def loss_of(outputs, i)
          return unless @inputs.loss_fn

          output = (outputs.size == 1) ? outputs.first : outputs
          loss, metrics = @inputs.loss_fn.call(output, @inputs.targets[i])
          check_loss(loss, metrics)
          @losses << loss.detach.clone
          @metrics << (metrics || {}).to_h { |name, value| [name.to_sym, value.is_a?(Torch::Tensor) ? value.item.to_f : Float(value)] }
          Distributed.send(:_same_tensors, [loss]).first
        end

        def check_loss(loss, metrics)
          return if loss.is_a?(Torch::Tensor) && loss.numel == 1 && [NilClass, Hash].include?(metrics.class)

          raise TypeError, "loss_fn: expected it to return a tensor of one element, or that and a Hash of metrics, got " \
            "#{loss.is_a?(Torch::Tensor) ? "a tensor of shape #{loss.shape}" : loss.inspect}#{" and #{metrics.inspect}" if metrics}"
        end

        def keep_output(outputs)
          @outputs << outputs.map(&:detach) if @keep_outputs
        end

        # --- between stages ---

        def take(kind, stage, i, from)
          return @handed.delete([kind, stage, i]) if @stages.key?(from)

          @link.fetch((kind == :F) ? Link::FORWARD : Link::BACKWARD, stage, i)
        end

        def pass_on(action, outputs)
          stage, i = action.stage, action.micro_batch
          if (other = @stages[stage + 1])
            @handed[[:F, stage + 1, i]] = outputs.map { |output| leaf(output, other.device) }
          else
            @link.send_forward(@owner.call(stage + 1), stage + 1, i, outputs)
            @link.expect_gradients(stage, i, outputs.select(&:requires_grad)) if Torch.grad_enabled?
          end
        end

        def pass_back(action, grads)
          stage, i = action.stage, action.micro_batch
          if (other = @stages[stage - 1])
            @handed[[:B, stage - 1, i]] = grads.map { |grad| grad.to(other.device) }
          else
            @link.send_backward(@owner.call(stage - 1), stage - 1, i, grads)
            release(grads)
          end
        end

        def leaf(output, device)
          copy = output.detach.to(device)
          output.requires_grad ? copy.requires_grad! : copy
        end

        def release(*lists)
          Distributed.send(:_release_tensors, lists.flatten)
        end
      end
    end
  end
end
