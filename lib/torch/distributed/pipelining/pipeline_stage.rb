# frozen_string_literal: true

module Torch
  module Distributed
    module Pipelining
      # A part of a model, as one stage of a pipeline.
      #
      #   stage = PipelineStage.new(layers: model.layers[0...4], stage_index: 0, num_stages: 2)
      #
      # A process may have one stage or several, and the stages of a process may be on several devices. Stages pass on tensors:
      # what a stage returns, a tensor or an Array of tensors, the next one is called with. Tensors of integers pass as well. What it
      # is called with is freed after the micro-batch's backward.
      #
      # The stage's module may be a {Torch::NN::Parallel::DistributedDataParallel}, or contain one, or be sharded by {FSDP}: its
      # gradients are reduced in the backward of the step's last micro-batch.
      class PipelineStage
        # @return [Torch::NN::Module]
        attr_reader :submodule

        # @return [Integer, nil] from 0; nil until a schedule has it, if it was not given
        attr_reader :stage_index

        # @return [Integer, nil] of the pipeline
        attr_reader :num_stages

        # @return [String, Torch::Device]
        attr_reader :device

        # @return [ProcessGroup, nil] nil: the default group, if stages are on several ranks
        attr_reader :group

        # @param submodule [Torch::NN::Module, nil] the stage's part of the model
        # @param layers [Enumerable<Torch::NN::Module>, nil] instead of `submodule`: modules that are called one after the other
        # @param stage_index [Integer, nil] from 0. nil: the rank, if this process has one stage; its place in the list of
        #   stages that the schedule gets, if that has all stages
        # @param num_stages [Integer, nil] how many stages the pipeline has; nil: likewise
        # @param device [String, Torch::Device, nil] where the stage is, to which the module is moved: make the optimizer afterwards. nil:
        #   where its parameters are
        # @param group [ProcessGroup, nil] the ranks of the pipeline; stage s is on rank s modulo their number. nil: the default group
        # @param mesh [DeviceMesh, nil] instead of `group`: of one dimension
        # @param input_args [Torch::Tensor, Array<Torch::Tensor>, nil] what a micro-batch's inputs are to look like: dtypes and shapes,
        #   but for the first dimension, are compared with them in each forward. nil: they are taken as they come
        # @raise [ArgumentError, TypeError] naming the argument that is wrong
        def initialize(submodule = nil, layers: nil, stage_index: nil, num_stages: nil, device: nil, group: nil, mesh: nil, input_args: nil)
          @submodule = module_of(submodule, layers)
          check_place(stage_index, num_stages)
          @stage_index = stage_index
          @num_stages = num_stages
          @group = group_of(group, mesh)
          # Moving makes other parameters, also where they are there already.
          @submodule.to(device) if device && @submodule.parameters.any? { |each| each.device.to_s != device.to_s }
          @device = device || @submodule.parameters.first&.device || "cpu"
          @input_args = input_args.is_a?(Torch::Tensor) ? [input_args] : input_args
          return if @input_args.nil? || (@input_args.is_a?(Array) && @input_args.all?(Torch::Tensor))

          raise TypeError, "input_args: expected a Torch::Tensor or an Array of tensors, got #{input_args.inspect}"
        end

        # @return [Boolean]
        def first?
          stage_index.zero?
        end
        alias_method :is_first, :first?

        # @return [Boolean]
        def last?
          stage_index == num_stages - 1
        end
        alias_method :is_last, :last?

        # @return [String]
        def inspect
          "#<#{self.class.name} #{stage_index.inspect} of #{num_stages.inspect}, #{submodule.class} on #{device}>"
        end

        # @api private
        def _place(index, count)
          check_place(index, count)
          @stage_index = index
          @num_stages = count
        end

        # @api private
        # @return [Array<Torch::Tensor>]
        def _forward(inputs, kwargs)
          check_inputs(inputs) if @input_args
          output = @submodule.call(*inputs, **kwargs)
          tensors = output.is_a?(Torch::Tensor) ? [output] : output
          return tensors if tensors.is_a?(Array) && !tensors.empty? && tensors.all?(Torch::Tensor)

          raise TypeError, "stage #{stage_index}: expected its module to return a Torch::Tensor or an Array of tensors, got #{output.class}"
        end

        private

        def module_of(submodule, layers)
          unless submodule.nil? ^ layers.nil?
            raise ArgumentError, "submodule, layers: expected one of them, got #{submodule.nil? ? "none" : "both"}"
          end

          list = layers&.to_a || [submodule]
          list.each do |each|
            next if each.is_a?(Torch::NN::Module)

            raise TypeError, "#{layers ? "layers" : "submodule"}: expected a Torch::NN::Module#{" each" if layers}, got #{each.inspect}"
          end
          raise ArgumentError, "layers: expected at least one" if list.empty?

          submodule || Torch::NN::Sequential.new(*list)
        end

        def check_place(index, count)
          return if index.nil? && count.nil?
          unless count.is_a?(Integer) && count.between?(1, Link::MOST_STAGES)
            raise ArgumentError, "num_stages: expected an Integer from 1 to #{Link::MOST_STAGES}, got #{count.inspect}"
          end
          return if index.is_a?(Integer) && index.between?(0, count - 1)

          raise ArgumentError, "stage_index: expected an Integer from 0 to #{count - 1}, since num_stages is #{count}, got #{index.inspect}"
        end

        def group_of(group, mesh)
          raise ArgumentError, "group, mesh: expected one of them, got both" if group && mesh
          return group && Distributed.send(:group_or_default, group) if mesh.nil?
          raise TypeError, "mesh: expected a DeviceMesh, got #{mesh.inspect}" unless mesh.is_a?(DeviceMesh)
          raise ArgumentError, "mesh: expected one dimension, got #{mesh.ndim}: pass mesh[\"pp\"] for instance" unless mesh.ndim == 1

          mesh.get_group
        end

        def check_inputs(inputs)
          form = ->(tensor) { [tensor.dtype, tensor.shape.drop(1)] }
          return if inputs.map(&form) == @input_args.map(&form)

          show = ->(list) { list.map { |tensor| "#{tensor.dtype} #{tensor.shape}" }.join(", ") }
          raise ArgumentError, "stage #{stage_index}: expected inputs like its input_args, #{show.call(@input_args)}, " \
            "got #{show.call(inputs)}"
        end
      end
    end
  end
end
