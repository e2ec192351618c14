# frozen_string_literal: true

require "torch/distributed"

module Torch
  module Distributed
    module Optim
      class ZeroRedundancyOptimizer < Torch::Optim::Optimizer
      end
    end
  end
end

require_relative "zero_redundancy_optimizer/arguments"
require_relative "zero_redundancy_optimizer/consolidation"
require_relative "zero_redundancy_optimizer/joining"
require_relative "zero_redundancy_optimizer/partition"

module Torch
  module Distributed
    module Optim
      # Divides an optimizer's state between the ranks of a group, after ZeRO (https://arxiv.org/abs/1910.02054): each rank
      # keeps the state of 1/N of the elements, updates these, and gathers the others from the ranks that have updated them.
      #
      #   model = Torch::NN::Parallel::DistributedDataParallel.new(net)
      #   optimizer = ZeroRedundancyOptimizer.new(model.parameters, optimizer_class: Torch::Optim::AdamW, lr: 0.001)
      #   loss.call(model.call(input), target).backward
      #   optimizer.step
      #
      # It takes the steps that `optimizer_class` would take over all parameters, for classes in which the update of an element
      # depends on that element's values alone, as in all of torch-rb. Unlike PyTorch's it divides by elements rather than by
      # whole parameters: no rank has more than its share, whatever the sizes of the parameters.
      #
      # Gradients must be the same on all ranks, as they are after DistributedDataParallel's backward; a rank uses its own range
      # of them. Nothing is updated before backward has ended, since it may use a parameter whose gradient is ready. Learning
      # rate schedulers and programs read and write {#param_groups} as with any optimizer.
      #
      # Where ranks have different numbers of inputs it joins with its model, which comes first:
      #
      #   Torch::Distributed::Algorithms::Join.run([model, optimizer]) do
      #     inputs.each { |input| train(model, optimizer, input) } # one step for each forward
      #   end
      class ZeroRedundancyOptimizer < Torch::Optim::Optimizer
        include OptimizerState
        include Consolidation
        include Joining

        ZERO_GRAD = Fused.instance_method(:_zero_grad)
        private_constant :ZERO_GRAD

        # @return [Torch::Optim::Optimizer] the one that steps on this rank's range: its parameters are parts of the ones that were given, as
        #   one-dimensional views
        attr_reader :optim

        # @return [ProcessGroup]
        attr_reader :process_group

        # A collective call: every rank of the group makes it, with parameters of the same shapes and with the same options.
        #
        # @param params [Array<Torch::NN::Parameter>, Array<Hash>] parameters, or groups of them: `{params: [...], lr: 0.1}`. One that is
        #   listed twice, as torch-rb does with tied weights, is stepped once.
        # @param optimizer_class [Class] `Torch::Optim::AdamW` for instance, or a fused one
        # @param process_group [ProcessGroup, nil] the ranks that divide the state; nil: the default group
        # @param parameters_as_bucket_view [Boolean] whether the parameters are moved, as views, to memory of the optimizer's, which
        #   ranks of a host share: then a step gathers them in one operation for each dtype, without copies in between. They stay
        #   the same objects. A file in which one of them alone is saved gets all of this memory.
        # @param defaults [Hash] the options of `optimizer_class`: `lr: 0.001`, `fused: true` ...
        # @raise [ArgumentError, TypeError] for an argument that is wrong, before anything is sent
        # @raise [GroupError] if there is no group, or this process is not in it
        # @raise [MismatchError] naming the first parameter or option in which two ranks differ; on all ranks
        def initialize(params, # rubocop:disable Lint/MissingSuper
          optimizer_class:, process_group: nil, parameters_as_bucket_view: false, **defaults)
          @process_group = Arguments.group(process_group)
          Arguments.check_class(optimizer_class)
          @as_views = parameters_as_bucket_view ? true : false
          groups = Arguments.groups(params)
          @lists = groups.map { |group| group[:params] }
          @partitions = groups.map { |group| partitions_of(group[:params]) }
          @optim = optimizer_class.new(groups.zip(@partitions).map { |group, parts| local_group(group, parts) }, **defaults)
          @param_groups = @optim.param_groups.zip(groups).map { |own, group| own.merge(params: group[:params]) }
          Arguments.agree(@process_group, "ZeroRedundancyOptimizer", ["optimizer_class: #{optimizer_class.name}",
            "parameters_as_bucket_view: #{@as_views}",
            *@param_groups.each_with_index.flat_map { |group, i| Arguments.described(group, i) }])
          forget_consolidated
        end

        # Updates the parameters. A collective call, after backward: all ranks make it.
        #
        # @param closure [#call, nil] computes the loss again; a block does the same
        # @return [Object, nil] what the closure returned
        # @raise [ArgumentError] if gradients are sparse, or `params` of a group were replaced; before anything is sent
        def step(closure = nil, &block)
          raise ArgumentError, "step: expected a closure or a block, got both" if closure && block

          Algorithms::Join.notify_join_context(self)
          loss = (closure || block)&.call
          take_step
          loss
        end

        # Adds a group whose state is divided between the ranks as well. A collective call.
        #
        # @param param_group [Hash] `{params: [...], lr: 0.1}`; options that it lacks are those that the constructor was given
        # @return [void]
        # @see #initialize for the errors
        def add_param_group(param_group)
          group = Arguments.group_of_parameters(param_group, "param_group", @param_groups.flat_map { |each| each[:params] })
          partitions = partitions_of(group[:params])
          index = @param_groups.size
          Arguments.agree(@process_group, "add_param_group", Arguments.described(group, index))
          @optim.add_param_group(local_group(group, partitions))
          @lists << group[:params]
          @partitions << partitions
          @param_groups << @optim.param_groups.last.merge(params: group[:params])
          forget_consolidated
          nil
        end

        # @param set_to_none [Boolean, nil] whether to forget the gradients rather than to fill them with zeros; nil: what `optimizer_class` does
        # @return [void]
        def zero_grad(set_to_none: nil)
          set_to_none = @optim.is_a?(Fused) if set_to_none.nil?
          ZERO_GRAD.bind_call(self, @param_groups, set_to_none)
          nil
        end

        # The state of all parameters, as `optimizer_class` gives it without ZeroRedundancyOptimizer, on the rank on which
        # {#consolidate_state_dict} has gathered it since the last step.
        #
        # @return [Hash]
        # @raise [Error] on other ranks, and before
        def state_dict
          check_consolidated
          super
        end

        # Takes over the state of all parameters, of which each rank keeps its range: from {#state_dict}, with any number of ranks, from an
        # optimizer of `optimizer_class`, or from PyTorch. Everything is checked before anything is changed. Every rank makes
        # this call.
        #
        # @param state_dict [Hash]
        # @return [nil]
        # @raise [ArgumentError] if it does not go with these parameters
        def load_state_dict(state_dict)
          super
          forget_consolidated
          write_options
          nil
        end

        # @api private
        # @return [Array<Partition::Piece>] this rank's pieces of the parameters
        def own_pieces
          @partitions.flatten.flat_map(&:own)
        end

        # Takes over the state of this rank's pieces, numbered as those of {#optim}.
        #
        # @api private
        # @param state_dict [Hash] what goes with {#optim}
        def load_local_state_dict(state_dict)
          @optim.load_state_dict(state_dict)
          @optim.param_groups.zip(@param_groups) { |own, group| group.merge!(own.except(:params)) }
          forget_consolidated
          nil
        end

        # @return [String]
        def inspect
          own = own_pieces.sum(&:length)
          all = @partitions.flatten.flat_map(&:params).sum(&:numel)
          "#<#{self.class.name} #{@optim.class.name}, rank #{@process_group.rank} of #{@process_group.size}, #{own} of #{all} elements>"
        end

        private

        # One for each dtype and device. Parameters that are frozen have one of their own, so that all ranks get as much of what trains.
        def partitions_of(params)
          params.uniq(&:object_id).group_by { |param| [param.dtype, Distributed._device_name(param.device), param.requires_grad] }
            .values.map { |each| Partition.new(each, @process_group, @as_views) }
        end

        def local_group(group, partitions)
          group.merge(params: partitions.flat_map(&:own).map(&:local))
        end

        # Looks at all gradients, so that all ranks raise.
        def check_gradients
          @param_groups.each_with_index do |group, i|
            group[:params].each_with_index do |param, j|
              next if (gradient = param.grad).nil? || gradient.layout == :strided

              raise ArgumentError, "step: expected a dense gradient of param_groups[#{i}][:params][#{j}], got one with layout #{gradient.layout}"
            end
          end
        end

        # What schedulers and programs have changed goes to the optimizer that steps.
        def write_options
          unless @param_groups.size == @partitions.size
            raise ArgumentError, "param_groups: expected #{@partitions.size}, got #{@param_groups.size}: groups are added by add_param_group"
          end

          @optim.param_groups.zip(@param_groups).each_with_index do |(own, group), i|
            unless group[:params].equal?(@lists[i])
              raise ArgumentError, "param_groups[#{i}][:params]: expected the parameters of the constructor, got others: their state is divided " \
                "between the ranks already; add_param_group adds parameters"
            end

            own.replace(group.merge(params: own[:params]))
          end
        end

        # @param joined [Boolean] whether this rank has no inputs left and follows the others
        def take_step(joined: false)
          check_gradients
          agree_joined(joined) if joining?
          write_options
          active = @partitions.flatten.select(&:active?)
          Torch.no_grad do
            update(active)
            active.each(&:gather)
          end
          # It was written through tensors of which autograd knows nothing.
          Distributed._written(active.flat_map(&:params))
          @optim.param_groups.zip(@param_groups) { |own, group| group.merge!(own.except(:params)) }
          forget_consolidated
        end

        def update(partitions)
          partitions.each(&:prepare)
          @optim.step
        ensure
          partitions.each(&:drop_gradients)
        end

        # Of whom {OptimizerState} asks what a state needs.
        def stepping
          @optim
        end

        # This rank's range of a state that {OptimizerState} has checked.
        def keep_state(param, loaded)
          kept = @optim.instance_variable_get(:@state)
          own_pieces_of(param).each do |piece|
            next kept.delete(piece.local) if loaded.nil?

            before = kept.key?(piece.local) ? kept[piece.local] : {}
            kept[piece.local] = loaded.to_h do |key, value|
              next [key, value] unless value.is_a?(Torch::Tensor)

              value = value.reshape(-1).narrow(0, piece.start, piece.length) if value.shape == param.shape
              [key, taken_over(before[key], value, piece.local)]
            end
          end
        end

        def own_pieces_of(param)
          @partitions.flatten.find { |each| each.include?(param) }.pieces_of(param)
            .filter_map { |rank, piece| piece if rank == @process_group.rank }
        end
      end
    end
  end
end
