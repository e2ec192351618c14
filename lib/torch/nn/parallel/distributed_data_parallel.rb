# frozen_string_literal: true

require "torch/distributed"

module Torch
  module NN
    module Parallel
      class DistributedDataParallel < Module
      end
    end
  end
end

require_relative "distributed_data_parallel/after_backward"
require_relative "distributed_data_parallel/arguments"
require_relative "distributed_data_parallel/casts"
require_relative "distributed_data_parallel/hooking"
require_relative "distributed_data_parallel/joining"
require_relative "distributed_data_parallel/logging"
require_relative "distributed_data_parallel/parameters"
require_relative "distributed_data_parallel/places"
require_relative "distributed_data_parallel/report"
require_relative "wrapper"

module Torch
  module NN
    module Parallel
      # Trains copies of one model on several processes, each with its own part of the data: after `backward` every
      # gradient is the mean over all processes, so all copies take the same steps.
      #
      #   Torch::Distributed.init_process_group
      #   model = Torch::NN::Parallel::DistributedDataParallel.new(net)
      #   loss.call(model.call(input), target).backward
      #   optimizer.step
      #
      # Gradients are reduced in buckets while `backward` is still running, and live in these buckets.
      # Parameters, state_dict (its keys begin with "module."), train, eval and so on are those of a module.
      class DistributedDataParallel < Module
        include Torch::Distributed::Algorithms::Joinable
        include Joining
        include Wrapper
        include Hooking
        include Report

        class << self
          # Leaves some parameters and buffers of a module alone: they are neither averaged nor broadcast. To be called
          # before the module is wrapped.
          #
          # @param mod [Torch::NN::Module]
          # @param names [Array<String>] as in its `named_parameters`, and "child.running_mean" for buffers
          # @raise [ArgumentError] naming those that it does not have
          def set_params_and_buffers_to_ignore_for_model(mod, names)
            unless mod.is_a?(Torch::NN::Module)
              raise ArgumentError, "module: expected a Torch::NN::Module, got #{mod.inspect} (#{mod.class})"
            end

            names = names.map(&:to_s)
            unknown = names - mod.named_parameters.keys - Parameters.named_buffers(mod).keys
            unless unknown.empty?
              raise ArgumentError, "names: expected parameters and buffers of the #{mod.class}, got #{unknown.map(&:inspect).join(", ")}"
            end

            mod.instance_variable_set(Parameters::IGNORED, names.freeze)
            nil
          end
          alias_method :_set_params_and_buffers_to_ignore_for_model, :set_params_and_buffers_to_ignore_for_model

          # @api private
          # @return [Boolean] whether a model that is in use averages the parameter's gradients
          def trains?(parameter)
            @trained.key?(parameter)
          end

          # @api private
          def train(parameters, model)
            parameters.each { |parameter| @trained[parameter] = model }
          end
        end

        @trained = ObjectSpace::WeakMap.new

        # @return [Torch::NN::Module] the model that was given
        attr_reader :module

        # @return [Torch::Distributed::ProcessGroup]
        attr_reader :process_group

        # A collective call: every rank of the group makes it with a model of the same shape and the same options.
        #
        # @overload initialize(mod, device_ids: nil, output_device: nil, dim: 0, broadcast_buffers: nil, forward_sync_buffers: nil,
        #   init_sync: true, process_group: nil, device_mesh: nil, bucket_cap_mb: nil, bucket_cap_mb_list: nil,
        #   find_unused_parameters: false, check_reduction: false, gradient_as_bucket_view: true, static_graph: false,
        #   delay_all_reduce_named_params: nil, param_to_hook_all_reduce: nil, mixed_precision: nil,
        #   skip_all_reduce_unused_params: false, batched_grad_copy: false)
        #   @param mod [Torch::NN::Module] the model; move it to its device before
        #   @param device_ids [Array<Integer, String, Torch::Device>, nil] the one GPU of this process, to which model and inputs are moved
        #   @param output_device [Integer, String, Torch::Device, nil] where outputs go; nil: where they are
        #   @param dim [Integer] for PyTorch's sake: inputs are not scattered where a process has one device
        #   @param broadcast_buffers [Boolean, nil] whether rank 0's buffers go to all, now and before each forward in training;
        #     nil: true
        #   @param forward_sync_buffers [Boolean, nil] whether they go to all before each forward in training; nil: as
        #     `broadcast_buffers` says
        #   @param init_sync [Boolean] whether rank 0's parameters and buffers go to all now
        #   @param process_group [Torch::Distributed::ProcessGroup, nil] nil: the default group
        #   @param device_mesh [Torch::Distributed::DeviceMesh, nil] one dimension of processes, instead of a group
        #   @param bucket_cap_mb [Numeric, nil] the size of a bucket of gradients in MiB; nil: 25, the first one 1
        #   @param bucket_cap_mb_list [Array<Numeric>, nil] the sizes of the buckets one after the other, the last being that of all
        #     that follow
        #   @param find_unused_parameters [Boolean] whether to look in each forward for parameters that its outputs do not
        #     depend on. Those that no process used keep their gradient, or none; for those that some did not use
        #     these count as zero.
        #   @param check_reduction [Boolean] deprecated, and without effect
        #   @param gradient_as_bucket_view [Boolean] whether gradients live in the buckets, so that there is memory for them once and
        #     nothing is copied. false keeps them apart, as is the default in PyTorch: for programs that put other tensors in
        #     the place of gradients.
        #   @param static_graph [Boolean] promises that each iteration uses the same parameters, as often as the first: then some
        #     may be unused, or used within checkpoints, at no cost
        #   @param delay_all_reduce_named_params [Array<Array(String, Torch::NN::Parameter)>, Array<String>, nil] parameters that are reduced
        #     together, outside of the other buckets
        #   @param param_to_hook_all_reduce [Torch::NN::Parameter, String, nil] the one whose gradient starts that
        #   @param mixed_precision [MixedPrecision, nil] smaller dtypes for forward, buffers, and for what is sent
        #   @param skip_all_reduce_unused_params [Boolean] whether buckets of parameters that no process used are not sent; needs
        #     `find_unused_parameters`
        #   @param batched_grad_copy [Boolean] for PyTorch's scripts, without effect: it bundles launches of kernels for copies that gradients
        #     which live in the buckets do not need
        #   @raise [ArgumentError] for an argument that is unknown, or wrong, or contradicts another one; before anything is sent
        #   @raise [Torch::Distributed::MismatchError] naming the parameter in which two ranks' models differ, or the option
        def initialize(mod, **options)
          super()
          unless mod.is_a?(Torch::NN::Module)
            raise TypeError, "mod: expected the Torch::NN::Module to train, got #{mod.inspect} (#{mod.class})"
          end

          @arguments = Arguments.new(mod, options)
          @process_group = @arguments.process_group
          @device = @arguments.device
          Parameters.new(mod).check_trained(mod)
          @module = @device ? mod.to(@device) : mod
          @casts = @arguments.mixed_precision && Casts.new(@module, @arguments.mixed_precision)
          @sync_gradients = true
          @sync_next_forward = true
          @rounds = 0
          @logging = Logging.new
          tie(@arguments.init_sync?)
        end

        # Runs the model. In training rank 0's buffers are sent to all first.
        #
        # Inputs and outputs may be nested in Arrays, Hashes, Structs and Data objects.
        #
        # A backward inside it, as for an inner gradient step, is the model's own: its gradients stay on this process.
        def forward(*inputs, **kwargs)
          output = suspending do
            joining? ? prepare_joined : prepare
            run(inputs, kwargs)
          end
          (Torch.grad_enabled? && @core.wants_outputs?) ? watched(output) : output
        end

        # Forwards within the block do not have gradients averaged: these are accumulated on each process, and the first
        # backward that belongs to a forward outside averages the sums. Saves communication when several batches make one step.
        #
        #   model.no_sync { loss.call(model.call(first), target).backward }
        #   loss.call(model.call(second), target).backward
        #
        # As in PyTorch the place of forward counts, not that of backward: gradients of a forward outside are averaged wherever
        # its backward is run. While they are awaited any backward counts as that one, so run it before others.
        #
        # @return [Object] the block's value
        def no_sync
          before = @sync_gradients
          @sync_gradients = false
          yield
        ensure
          @sync_gradients = before
        end

        # Lets processes with different numbers of batches train together: one that has none left takes part in the
        # others' communication until all are through, and then gets the model of those who were last.
        #
        #   model.join do
        #     batches.each { |input, target| step(model, input, target) }
        #   end
        #
        # @param divide_by_initial_world_size [Boolean] whether gradients are divided by the number of all processes, so that each
        #   batch counts the same over the whole of training; false: by the number of those that still have batches
        # @param enable [Boolean] false: the block is run and nothing else
        # @param throw_on_early_termination [Boolean] whether to raise on all processes as soon as one has no batch left
        # @return [Object] the block's value
        # @see Torch::Distributed::Algorithms::Join for several joinables
        def join(divide_by_initial_world_size: true, enable: true, throw_on_early_termination: false, &block)
          Torch::Distributed::Algorithms::Join.run([self], enable: enable, throw_on_early_termination: throw_on_early_termination,
            divide_by_initial_world_size: divide_by_initial_world_size, &block)
        end

        # Registers a hook that processes the gradients of a bucket instead of averaging them. To be called once, on all
        # ranks, before the first backward.
        #
        #   model.register_comm_hook(:fp16_compress)
        #   model.register_comm_hook(:power_sgd, state: PowerSGDState.new(matrix_approximation_rank: 2))
        #   model.register_comm_hook do |_state, bucket|
        #     Torch::Distributed.all_reduce(bucket.buffer.div!(world_size), async_op: true)
        #   end
        #
        # A hook in Ruby is called with the state and a {Torch::Distributed::GradBucket}, on the thread that runs backward, and gives the
        # bucket's new contents: a tensor, or a {Torch::Distributed::Future} or {Torch::Distributed::Work} that gives it. Sparse gradients are not in buckets.
        # For parameters on GPUs, whose gradients autograd computes on threads that cannot run Ruby, it is called for all buckets once
        # `backward` has computed them, before that returns: communication does not overlap with it.
        #
        # What another thread raises meanwhile (`Timeout.timeout`, `Thread#raise`) is held back until the hook waits for an
        # operation, or has returned: backward then fails, and the next forward goes on with the hook where it was. What the
        # hook itself raises, or the handler of a signal while the hook computes, fails this model's rounds for good.
        #
        # @overload register_comm_hook(hook, state: nil)
        # @overload register_comm_hook(hook:, state: nil)
        # @overload register_comm_hook(state: nil) { |state, bucket| … }
        # @overload register_comm_hook(state, hook)
        #   As PyTorch has it; also `register_comm_hook(state, hook:)` and with a block.
        # @param hook [Symbol, Torch::Distributed::Algorithms::DDPCommHooks::BuiltIn, Torch::Distributed::CommHook, #call] see
        #   {Torch::Distributed::Algorithms::DDPCommHooks}
        # @param state [Object] what the hook is called with; for some built-in ones a `PowerSGDState` or `PostLocalSGDState`
        # @return [nil]
        # @raise [ArgumentError] if it is not a hook, if there is one already, or if it is too late
        def register_comm_hook(*positional, state: nil, hook: nil, &block)
          state, hook = comm_hook_arguments(positional, state, hook, block)
          if @comm_hook
            raise ArgumentError, "register_comm_hook: there is one already, #{@comm_hook.name}" \
              "#{", for mixed_precision's reduce_dtype" if @arguments.mixed_precision&.compress}"
          end
          if (@rounds + @core.rounds).positive?
            raise ArgumentError, "register_comm_hook: expected to be called before the first backward, there were #{@rounds + @core.rounds}"
          end

          registered = hook_of(state, hook)
          install_hook(registered, @parameters_of_model.trained)
          @comm_hook = registered
          nil
        end

        # Runs a hook in Ruby for gradients on devices, after backward.
        #
        # @api private
        # @return [Boolean] whether there is a backward to come
        def _finish_backward
          @core&.finish_backward
          @core ? @core.round_open? : false
        end

        # @return [Boolean] whether the next forward in training sends rank 0's buffers to all
        def will_sync_module_buffers?
          @sync_next_forward && @arguments.forward_sync_buffers? && !@parameters_of_model.buffers.empty?
        end

        # The next backward averages the gradients, with what has been added up since the last one: for pipelines, where forwards of other
        # micro-batches, all within {#no_sync}, come between a forward and its backward.
        #
        # @api private
        def _average_next_backward
          suspending { @core.prepare(true) }
        end

        # @api private
        # @raise [Torch::Distributed::UnsupportedError] if unused parameters would have to be found
        def _check_for_pipeline
          return unless @arguments.find_unused? || @arguments.static_graph?

          raise Torch::Distributed::UnsupportedError, "a stage of a pipeline: expected a DistributedDataParallel without " \
            "find_unused_parameters and static_graph, which look at each forward: leave them out"
        end

        # @raise [TypeError] as `dup`, `clone` and `deep_dup` do: save `model.module`, or copy that and wrap the copy
        def marshal_dump
          refuse_copy
        end

        # Moves and converts as a module does. Parameters become other tensors by that, so they are tied
        # anew: a collective call.
        def _apply(fn)
          super
          tie(false) if @core
          self
        end

        private

        # Hooks are armed again when forward is over.
        def suspending
          @core&.suspend
          value = yield
          completed = true
          value
        ensure
          @core&.arm(completed)
          AfterBackward.await(self) if @core&.hook_after_backward? && @core.round_open?
        end

        def run(inputs, kwargs)
          if @device || @casts
            inputs = placed(inputs)
            kwargs = placed(kwargs)
          end
          output = @casts ? @casts.during { @module.call(*inputs, **kwargs) } : @module.call(*inputs, **kwargs)
          @arguments.output_device ? moved(output, @arguments.output_device) : output
        end

        # Copies would share the gradient hooks.
        def initialize_copy(_other)
          refuse_copy
        end

        def refuse_copy
          raise TypeError, "a #{DistributedDataParallel.name} belongs to its process and to its group, it cannot be copied or dumped: copy or " \
            "save model.module instead, or its state_dict, or use Torch::Distributed::Checkpoint"
        end

        def prepare
          return unless Torch.grad_enabled?

          Torch::Distributed::StepMemory.instance.step
          tie(false) if stale?
          @logging.sample(@core) if @sync_gradients
          # First, since it names the parameters that the last backward left out; with the buffers first, ranks that
          # differ there would only see a mismatch of operations.
          @core.prepare(@sync_gradients)
          @core.sync_buffers(0) if buffers_due?
          # As in PyTorch: what a forward without synchronization left alone, the next one leaves alone as well.
          @sync_next_forward = @sync_gradients
        end

        def buffers_due?
          @training && Torch.grad_enabled? && will_sync_module_buffers?
        end

        # Whether parameters were frozen, thawed, moved, converted or replaced. There is no core if the ranks differed when
        # parameters were to be hooked again.
        def stale?
          return true if @core.nil? || @core.stale?
          return false if @places.same?

          @places = Places.new(@module)
          !@parameters_of_model.same?(Parameters.new(@module))
        end

        # Registers hooks on the parameters that train, and broadcasts rank 0's values.
        def tie(init_sync)
          found = Parameters.new(@module)
          release
          @core = create_core(found, init_sync)
          @comm_hook ||= compressing_hook(found)
          install_hook(@comm_hook, found.trained) if @comm_hook
          @parameters_of_model = found
          @places = Places.new(@module)
          DistributedDataParallel.train(found.trained, self)
          broadcast_all(found.frozen, 0) if init_sync
        end

        # Otherwise both cores would react to the same gradients until the garbage collector runs.
        def release
          return unless @core

          if @core.round_open?
            Torch::Distributed._warn "rank #{@process_group.rank}: parameters were frozen, thawed, moved, converted or replaced between a forward and its backward, whose " \
              "gradients now stay on this rank: do it after backward"
          end
          @rounds += @core.rounds
          core, @core = @core, nil
          core.release
        end

        def create_core(found, init_sync)
          arguments = @arguments
          named = @module.named_parameters
          trigger = named[arguments.delayed_by]
          # The parameter that triggers the delayed all_reduce is not delayed itself.
          flags = found.flags(named.values_at(*arguments.delayed).reject { |parameter| parameter.equal?(trigger) })
          Torch::Distributed::GradientSync._create(@process_group, found.trained, found.names, flags, found.frozen,
            (arguments.forward_sync_buffers? || arguments.initial_buffers?) ? found.buffers : [],
            limits: arguments.limits, find_unused: arguments.find_unused?, static_graph: arguments.static_graph?,
            skip_unused: arguments.skip_unused?, init_sync: init_sync, gradients_apart: !arguments.gradient_as_bucket_view?,
            delayed_by: trigger && found.index(trigger))
        end

        def placed(value)
          value = @casts.inputs(value) if @casts
          @device ? moved(value, @device) : value
        end

        def moved(value, device)
          Torch::Distributed::Nested.to(value, device)
        end

        # Passes the core the outputs that backward will start from.
        def watched(output)
          nested = Torch::Distributed::Nested
          tensors = nested.outputs(output, "DistributedDataParallel of a #{@module.class}")
          fresh = @core.outputs(tensors)
          known = tensors.zip(fresh).to_h { |tensor, other| [tensor.object_id, other] }
          nested.map(output) { |tensor| known.fetch(tensor.object_id) }
        end
      end
    end
  end
end
