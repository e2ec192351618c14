# frozen_string_literal: true

require "torch/distributed"

module Torch
  module NN
    # Batch normalisation with the mean and the variance of all processes' batches together, where BatchNorm knows only
    # its own process's: for small batches on each, and for the same results on any number of processes.
    #
    #   model = Torch::NN::SyncBatchNorm.convert_sync_batchnorm(model)
    #   model = Torch::NN::Parallel::DistributedDataParallel.new(model)
    #
    # In training, forward and backward are collective calls: every process of the group makes the same ones, but batches
    # may differ in size, and be empty on some. Otherwise, and without a process group, it is a plain BatchNorm. It takes
    # input of two to five dimensions, [N, C] or [N, C, ...]; in float16 and bfloat16, as in mixed precision, it computes in
    # float32.
    class SyncBatchNorm < BatchNorm
      # @return [Torch::Distributed::ProcessGroup, nil] nil: the default group
      attr_reader :process_group

      # @param num_features [Integer] C, how many channels there are
      # @param eps [Float] added to the variance
      # @param momentum [Float, nil] the share of each batch in the running statistics; nil: their plain mean over all batches
      # @param affine [Boolean] whether weight and bias are learned
      # @param track_running_stats [Boolean] whether statistics are kept for evaluation
      # @param process_group [Torch::Distributed::ProcessGroup, nil] nil: the default group as it is at each forward
      def initialize(num_features, eps: 1e-5, momentum: 0.1, affine: true, track_running_stats: true, process_group: nil)
        super(num_features, eps: eps, momentum: momentum, affine: affine, track_running_stats: track_running_stats)
        @process_group = process_group
      end

      # Replaces each BatchNorm1d, 2d and 3d within a model by a SyncBatchNorm with the same parameters and buffers, under
      # the same name. Do it before DistributedDataParallel; an optimizer made before stays right.
      #
      # @param mod [Torch::NN::Module] changed in place
      # @param process_group [Torch::Distributed::ProcessGroup, nil] nil: the default group
      # @return [Torch::NN::Module] the model; another one if it was a BatchNorm itself
      def self.convert_sync_batchnorm(mod, process_group = nil)
        Conversion.new(process_group).convert(mod)
      end

      # @api private
      # @param norm [Torch::NN::BatchNorm]
      def self.from(norm, process_group)
        settings = %i[eps momentum affine track_running_stats].to_h { |name| [name, norm.instance_variable_get(:"@#{name}")] }
        fresh = new(norm.instance_variable_get(:@num_features), **settings, process_group: process_group)
        fresh.send(:take_over, norm)
        fresh
      end

      # @param input [Torch::Tensor]
      # @return [Torch::Tensor]
      # @raise [Torch::Distributed::InvalidArgumentError] if all processes together have less than two values a channel
      def forward(input)
        _check_input_dim(input)
        factor = @training ? count_batch : 0.0
        group = @training ? group_now : nil
        return normalise_alone(input, factor) unless group

        statistics = @track_running_stats ? [@running_mean, @running_var] : [nil, nil]
        dtype = input.dtype
        return normalise_together(input, [@weight, @bias, *statistics], group, factor) unless HALVES.include?(dtype)

        wide = [@weight, @bias, *statistics].map { |tensor| tensor && widened(tensor) }
        output = normalise_together(widened(input), wide, group, factor)
        # What was in half precision itself is not written to by its cast.
        statistics.zip(wide.last(2)) { |own, cast| own.copy!(cast) unless own.equal?(cast) }
        output.to(dtype: dtype)
      end

      # @api private
      def _check_input_dim(input)
        return if input.dim.between?(2, 5)

        raise ArgumentError, "expected at least 2D and at most 5D input (got #{input.dim}D input)"
      end

      HALVES = %i[float16 bfloat16].freeze
      private_constant :HALVES

      private

      def widened(tensor)
        HALVES.include?(tensor.dtype) ? tensor.to(dtype: :float32) : tensor
      end

      def normalise_together(input, tensors, group, factor)
        output = Torch.empty(0)
        Torch::Distributed.send(:_sync_batch_norm, output, input, group, tensors, factor, @eps)
      end

      def normalise_alone(input, factor)
        F.batch_norm(input, @running_mean, @running_var, weight: @weight, bias: @bias,
          training: @training || !@track_running_stats, momentum: factor, eps: @eps)
      end

      # The share of this batch in the running statistics.
      def count_batch
        return @momentum || 0.0 unless @track_running_stats

        Torch.no_grad { @num_batches_tracked.add!(1) }
        @momentum || 1.0 / @num_batches_tracked.item
      end

      def group_now
        return unless @process_group || Torch::Distributed.initialized?

        Torch::Distributed.send(:group_or_default, @process_group)
      end

      def take_over(norm)
        @training = norm.training
        if @affine
          @weight = norm.instance_variable_get(:@weight)
          @bias = norm.instance_variable_get(:@bias)
        end
        norm.named_buffers.each { |name, buffer| register_buffer(name, buffer) }
      end

      # Walks a model once, however its modules refer to each other.
      #
      # @api private
      class Conversion
        def initialize(process_group)
          @process_group = process_group
          @converted = {}.compare_by_identity
        end

        def convert(value)
          case value
          when Module then @converted[value] || convert_module(value)
          when Array then convert_array(value)
          when Hash then convert_hash(value)
          else value
          end
        end

        private

        def convert_module(mod)
          # Torch-rb's InstanceNorm is derived from BatchNorm, but knows no batches.
          if mod.is_a?(BatchNorm) && !mod.is_a?(InstanceNorm)
            return @converted[mod] = SyncBatchNorm.from(mod, @process_group)
          end

          @converted[mod] = mod
          mod.instance_variables.each do |name|
            before = mod.instance_variable_get(name)
            after = convert(before)
            mod.instance_variable_set(name, after) unless after.equal?(before)
          end
          mod
        end

        # Lists and tables in which a model keeps its modules: the same objects, where they may be changed.
        def convert_array(array)
          convert_list(array, array.each_index)
        end

        def convert_hash(hash)
          convert_list(hash, hash.keys)
        end

        def convert_list(list, places)
          return @converted[list] if @converted[list]

          @converted[list] = list
          changed = places.map { |place| [place, convert(list[place])] }.reject { |place, value| value.equal?(list[place]) }
          return list if changed.empty?

          target = list.frozen? ? list.dup : list
          changed.each { |place, value| target[place] = value }
          @converted[list] = list.frozen? ? target.freeze : target
        end
      end
      private_constant :Conversion
    end
  end
end
