# frozen_string_literal: true

module Torch
  module Distributed
    module Pipelining
      # Trains a model in stages: divides each batch into micro-batches, whose forwards and backwards the stages run at the same
      # time. {ScheduleGPipe}, {Schedule1F1B}, {ScheduleInterleaved1F1B} and {ScheduleInterleavedZeroBubble} differ in the order.
      #
      #   schedule = Schedule1F1B.new(stage, n_microbatches: 8, loss_fn: loss)
      #   optimizer = Torch::Optim::Adam.new(stage.submodule.parameters, lr: 1e-3)
      #   schedule.step(x, target: y, losses: losses = [])     # the same call on all ranks
      #   optimizer.step
      #
      # Gradients are those of the mean over the batch, if `loss_fn` is the mean over what it gets: each micro-batch's loss counts by
      # its share of the target's rows. It is scaled before its backward, not the gradients at the end, so those that were there
      # before the step are added to as they are.
      class Schedule
        # @return [Array<PipelineStage>] this process's
        attr_reader :stages

        # @return [Integer]
        attr_reader :n_microbatches

        # @return [Array<Array<Action>>] what each rank does in a step, in order
        attr_reader :plan

        # A collective call of the pipeline's ranks: what does not fit together is an error on all of them.
        #
        # @param stages [PipelineStage, Array<PipelineStage>] this process's; all of the pipeline's, for one process with several devices
        # @param n_microbatches [Integer] into how many micro-batches a batch is divided
        # @param loss_fn [#call, nil] is called with the last stage's output and the target of a micro-batch; gives the loss, or the
        #   loss and a Hash of metrics (numbers). Needed where the last stage is; nil: only {#eval} can be called
        # @param scale_grads [Boolean] whether gradients are those of the mean of the micro-batches' losses; false: of their sum
        # @param tie [Array<Hash{Integer => String}>] parameters that are one: for each its name in the modules of two or more stages,
        #   `{0 => "embedding.weight", 3 => "head.weight"}`. They get the lowest stage's values now, and the same gradient in each step
        # @raise [ArgumentError, TypeError] naming the argument that is wrong
        # @raise [MismatchError] on all ranks if stages or arguments do not fit together
        def initialize(stages, n_microbatches:, loss_fn: nil, scale_grads: true, tie: [])
          @layout = StageLayout.new(stages)
          @stages = @layout.stages
          @n_microbatches = n_microbatches
          @loss_fn = loss_fn
          @scale_grads = scale_grads
          @clock = Measurement.new
          @layout.agree(self.class.name) do
            check_arguments
            @stages.each { |stage| GradientReduction.new(stage, false).check }
            @plan = plan_for(@layout.plan_ranks(self.class.several_stages?), @layout.num_stages)
            @ties = Ties.new(tie, @layout.by_index, @layout.owner, @layout.num_stages)
            {"schedule" => self.class.name, "n_microbatches" => n_microbatches, "scale_grads" => scale_grads, "tie" => @ties.description}
          end
          @link = @layout.local? ? nil : Link.new(@layout.group, @stages.first.device)
          @ties.equalize(@link)
        end

        # Whether a rank may have several stages.
        #
        # @api private
        def self.several_stages?
          false
        end

        # Forward and backward of a batch. A collective call of the pipeline's ranks.
        #
        # @param args [Array<Torch::Tensor>] the first stage's inputs, divided by their first dimension; without effect where that is not
        # @param target [Object] tensors, also nested, divided likewise; without effect where the last stage is not
        # @param losses [Array, nil] gets the loss of each micro-batch, on all ranks
        # @param metrics [Array, nil] gets the metrics of each micro-batch, Hashes from Symbols to Floats, on all ranks
        # @param return_outputs [Boolean, Symbol] whether the outputs are kept and returned where the last stage is, which takes memory;
        #   `:all`: on all ranks
        # @param kwargs [Hash] for the module of each stage of this process; tensors in them are divided likewise
        # @return [Torch::Tensor, Array<Torch::Tensor>, nil] the last stage's output, where it is; elsewhere nil
        # @raise [ArgumentError] if a tensor has fewer rows than there are micro-batches, or there is no `loss_fn` or no target
        # @raise [RuntimeError] under no_grad
        def step(*args, target: nil, losses: nil, metrics: nil, return_outputs: true, **kwargs)
          raise "step: expected gradients to be enabled, but they are not: call eval for a forward only" unless Torch.grad_enabled?
          if @layout.last_here? && !@loss_fn
            raise ArgumentError, "step: expected a loss_fn, which this #{self.class.name} has not: give it one, or call eval"
          end

          run(args, target, losses, metrics, return_outputs, kwargs, training: true)
        end

        # Forward of a batch, without gradients. Modules stay in their mode: call `eval` of them. A collective call.
        #
        # @return [Torch::Tensor, Array<Torch::Tensor>, nil]
        # @see #step for the arguments; with a target losses and metrics are computed as well
        def eval(*args, target: nil, losses: nil, metrics: nil, return_outputs: true, **kwargs)
          Torch.no_grad { run(args, target, losses, metrics, return_outputs, kwargs, training: false) }
        end

        # The measured bubble beside the theory, of all steps since the last report. A collective call. On a GPU times are those in
        # which work is given to it.
        #
        # @return [Report]
        def report
          summaries = @layout.gather(@clock.summary)
          @clock.clear
          Report.new(self.class.name[/\w+\z/], @layout.local? ? [@order] : @plan, summaries)
        end

        # What each rank did when in the last step: {Timeline#to_svg} draws it. A collective call. Times are of the ranks' clocks,
        # which are the same on one host.
        #
        # @return [Timeline]
        def timeline
          spans = @layout.gather(@clock.spans.map { |span| [span.action.to_s, span.start, span.finish] })
          Timeline.new(spans.map { |list| list.map { |action, start, finish| Timeline::Span.new(Action.parse(action), start, finish) } })
        end

        private

        # @return [Array<Array<Action>>] for so many ranks and stages
        def plan_for(_ranks, _stages)
          raise NotImplementedError, "#{self.class}: expected a schedule with an order"
        end

        def check_arguments
          unless @n_microbatches.is_a?(Integer) && @n_microbatches.between?(1, Link::MOST_MICRO_BATCHES)
            raise ArgumentError, "n_microbatches: expected an Integer from 1 to #{Link::MOST_MICRO_BATCHES}, got #{@n_microbatches.inspect}"
          end
          unless @loss_fn.nil? || @loss_fn.respond_to?(:call)
            raise ArgumentError, "loss_fn: expected something that can be called, got #{@loss_fn.inspect}"
          end
          return if [true, false].include?(@scale_grads)

          raise ArgumentError, "scale_grads: expected true or false, got #{@scale_grads.inspect}"
        end

        def run(args, target, losses, metrics, return_outputs, kwargs, training:)
          check_call(losses, metrics, return_outputs)
          inputs = divide(args, target, kwargs, training)
          execution = Execution.new(@layout.by_index, @layout.owner, @link, inputs, training ? @clock : Measurement.new,
            keep_outputs: return_outputs && @layout.last_here?)
          results = attempt do
            execute(execution, training)
            Results.share(@layout, @link, execution, return_outputs == :all)
          end
          losses&.replace(results.losses)
          metrics&.replace(results.metrics)
          results.output
        end

        # Messages may be under way when it fails.
        def attempt
          @failure = "it was interrupted"
          value = yield
          @failure = nil
          value
        rescue => e
          e = @link&.failure || e if e.is_a?(GroupError)
          @failure = e.message
          raise e
        end

        def execute(execution, training)
          StepMemory.instance.step if training
          @link&.begin((@messages ||= {})[training] ||= MessageOrder.for_rank(training ? @plan : forward_plan, @layout.rank))
          return execution.run(list_of(forward_plan)) unless training

          @clock.step do
            @ties.begin
            execution.run(@order ||= list_of(@plan))
            @ties.sum(@link)
          end
        end

        def forward_plan
          @forward_plan ||= Orders.forward_only(@plan.size, @layout.num_stages, @n_microbatches)
        end

        def list_of(plan)
          @layout.local? ? Timeline.merge(plan) : plan.fetch(@layout.rank)
        end

        def check_call(losses, metrics, return_outputs)
          if @failure
            raise GroupError, "an earlier step of this schedule failed (#{@failure}): its messages may be under way still, make new groups"
          end
          {losses: losses, metrics: metrics}.each do |name, list|
            next if list.nil? || (list.is_a?(Array) && !list.frozen?)

            raise ArgumentError, "#{name}: expected nil or an Array to fill, got #{list.inspect}"
          end
          return if [true, false, :all].include?(return_outputs)

          raise ArgumentError, "return_outputs: expected true, false or :all, got #{return_outputs.inspect}"
        end

        def divide(args, target, kwargs, training)
          count = @n_microbatches
          raise ArgumentError, "args: expected the first stage's inputs, got none" if @layout.first_here? && args.empty? && kwargs.empty?
          if training && @layout.last_here? && target.nil?
            raise ArgumentError, "target: expected that of the batch where the last stage is, got nil"
          end

          # Where they are not needed as well: a wrong batch is an error on all ranks that are given it.
          MicroBatches.check("args", args, count)
          MicroBatches.check("target", target, count)
          targets = MicroBatches.split("target", target, count) if @layout.last_here?
          Execution::Inputs.new(
            @layout.first_here? ? MicroBatches.split("args", args, count) : nil, MicroBatches.split("kwargs", kwargs, count), targets,
            target.nil? ? nil : @loss_fn, targets && (@scale_grads ? MicroBatches.weights(targets) : [1.0] * count)
          )
        end
      end
    end
  end
end
