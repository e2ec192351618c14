# frozen_string_literal: true

require "torch/distributed"

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
        MEBIBYTE = 1024 * 1024
        DEFAULT_BUCKET_CAP_MB = 25
        MAX_BUCKET_CAP_MB = 1 << 40 # in bytes still a whole number of 64 bits
        private_constant :MEBIBYTE, :DEFAULT_BUCKET_CAP_MB, :MAX_BUCKET_CAP_MB

        # @return [Torch::NN::Module] the model that was given
        attr_reader :module

        # @return [Torch::Distributed::ProcessGroup]
        attr_reader :process_group

        # A collective call: every rank of the group makes it with a model of the same shape.
        #
        # @param mod [Torch::NN::Module] the model; move it to its device before
        # @param device_ids [Array<Integer, String, Torch::Device>, nil] the one GPU of this process, to which model and inputs are moved
        # @param output_device [Integer, String, Torch::Device, nil] where outputs go; nil: where they are
        # @param process_group [Torch::Distributed::ProcessGroup, nil] nil: the default group
        # @param broadcast_buffers [Boolean] whether rank 0's buffers go to all before each forward in training
        # @param init_sync [Boolean] whether rank 0's parameters and buffers go to all now
        # @param bucket_cap_mb [Numeric, nil] the size of a bucket of gradients in MiB; nil: 25, the first one 1
        # @raise [Torch::Distributed::MismatchError] naming the parameter in which two ranks' models differ
        def initialize(mod, device_ids: nil, output_device: nil, process_group: nil, broadcast_buffers: true,
          init_sync: true, bucket_cap_mb: nil)
          super()
          unless mod.is_a?(Torch::NN::Module)
            raise TypeError, "mod: expected the Torch::NN::Module to train, got #{mod.inspect} (#{mod.class})"
          end

          @process_group = Torch::Distributed.send(:group_or_default, process_group)
          @bucket_bytes = bucket_bytes(bucket_cap_mb)
          @device = single_device(device_ids)
          @output_device = output_device && device_of(output_device)
          @module = @device ? mod.to(@device) : mod
          @broadcast_buffers = broadcast_buffers
          @sync_gradients = true
          @sync_next_forward = true
          tie(init_sync)
        end

        # Runs the model. In training rank 0's buffers are sent to all first.
        def forward(*inputs, **kwargs)
          prepare
          inputs = move(inputs, @device)
          kwargs = move(kwargs, @device)
          output = @module.call(*inputs, **kwargs)
          @output_device ? move(output, @output_device) : output
        end

        # Within the block gradients are only accumulated on each process; the first backward after it that
        # belongs to a forward outside averages the sums. Saves communication when several batches make one step.
        #
        #   model.no_sync { loss.call(model.call(first), target).backward }
        #   loss.call(model.call(second), target).backward
        #
        # @return [Object] the block's value
        def no_sync
          before = @sync_gradients
          @sync_gradients = false
          yield
        ensure
          @sync_gradients = before
        end

        # Sizes of the buckets in bytes, for the curious: the plan changes once, after the first backward.
        #
        # @return [Array<Integer>]
        def bucket_sizes
          @core.bucket_sizes
        end

        # Moves and converts as a module does. Parameters become other tensors by that, so they are tied
        # anew: a collective call.
        def _apply(fn)
          super
          tie(false) if @core
          self
        end

        private

        def prepare
          return unless Torch.grad_enabled?

          Torch::Distributed::StepMemory.instance.step

          # First, for it names the parameters that the backward before left out; ranks that differ there would
          # only learn from the buffers that they do.
          @core.prepare(@sync_gradients)
          @core.sync_buffers(0) if @training && @sync_next_forward && @buffer_count.positive?
          # As in PyTorch: what a forward without synchronization left alone, the next one leaves alone as well.
          @sync_next_forward = @sync_gradients
        end

        # Hooks the parameters that train, and makes all ranks' alike.
        def tie(init_sync)
          # Names are the model's own; a tensor that has two of them counts once.
          named = @module.named_parameters.to_a.uniq { |_, parameter| parameter.object_id }
          training, frozen = named.partition { |_, parameter| parameter.requires_grad }
          if training.empty?
            raise ArgumentError, "no parameter of the #{@module.class} requires a gradient: there is nothing to average, " \
              "and DistributedDataParallel is not needed"
          end

          buffers = @broadcast_buffers ? all_buffers : []
          @buffer_count = buffers.size
          @core = nil
          @core = Torch::Distributed::GradientSync._create(@process_group, training.map(&:last), training.map(&:first),
            [0] * training.size, [], buffers, {limits: @bucket_bytes, init_sync: init_sync})
          return unless init_sync

          frozen.each { |_, parameter| Torch::Distributed.broadcast(parameter, group_src: 0, group: @process_group) }
        end

        # Torch-rb's `buffers` are those of one module without its children.
        def all_buffers
          @module.modules.flat_map { |mod| mod.named_buffers.values }.grep(Torch::Tensor).uniq(&:object_id)
        end

        # An explicit size is that of the first bucket too, as in PyTorch.
        def bucket_bytes(bucket_cap_mb)
          return [MEBIBYTE, DEFAULT_BUCKET_CAP_MB * MEBIBYTE] if bucket_cap_mb.nil?
          unless bucket_cap_mb.is_a?(Numeric) && bucket_cap_mb.between?(0, MAX_BUCKET_CAP_MB) && bucket_cap_mb.positive?
            raise ArgumentError, "bucket_cap_mb: expected a positive number of MiB, at most #{MAX_BUCKET_CAP_MB}, " \
              "got #{bucket_cap_mb.inspect}"
          end

          bytes = [(bucket_cap_mb * MEBIBYTE).to_i, 1].max
          [bytes, bytes]
        end

        def single_device(device_ids)
          ids = Array(device_ids)
          return if ids.empty?
          unless ids.size == 1
            raise ArgumentError, "device_ids: expected the one device of this process, got #{ids.size}: #{ids.inspect}"
          end

          device_of(ids.first)
        end

        def device_of(device)
          return device if device.is_a?(Torch::Device)
          return Torch.device(device.to_s) unless device.is_a?(Integer)
          unless Torch::CUDA.available? && device.between?(0, Torch::CUDA.device_count - 1)
            raise ArgumentError, "device_ids: there is no GPU #{device} here (#{Torch::CUDA.device_count} found): " \
              "leave device_ids out to train on the CPU"
          end

          Torch.device("cuda:#{device}")
        end

        def move(value, device)
          return value unless device

          case value
          when Torch::Tensor then value.to(device)
          when Array then value.map { |each| move(each, device) }
          when Hash then value.transform_values { |each| move(each, device) }
          else value
          end
        end
      end
    end
  end
end
