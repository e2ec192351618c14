# frozen_string_literal: true

module Torch
  module Distributed
    module Tensor
      module Parallel
        # What both styles of Linear and Embedding have in common.
        #
        # @api private
        class LayerStyle < ParallelStyle
          CLASSES = [Torch::NN::Linear, Torch::NN::Embedding].freeze
          private_constant :CLASSES

          private

          # @return [Class] Linear or Embedding
          # @raise [ArgumentError] for another, or one whose forward is its own
          def kind(target)
            CLASSES.find { |each| target.mod.is_a?(each) && FSDP::ForwardMethods.owner(target.mod.class) == each } ||
              raise(ArgumentError, "#{target}: expected a Linear or an Embedding, with their forward, for #{self.class.name[/\w+\z/]}, " \
                "got a #{target.mod.class}")
          end

          def embedding?(target)
            target.mod.is_a?(Torch::NN::Embedding)
          end

          # @return [Torch::Tensor] the one argument
          def input_of(target, inputs, kwargs)
            unless inputs.size == 1 && kwargs.empty? && inputs.first.is_a?(Torch::Tensor)
              raise ArgumentError, "#{target}: expected to be called with one tensor, got #{(inputs + kwargs.to_a).map(&:class).join(", ")}"
            end

            inputs.first
          end

          # @return [Array(Torch::Tensor, Torch::Tensor)] weight and bias
          def parameters_of(mod)
            [mod.instance_variable_get(:@weight), mod.instance_variable_get(:@bias)]
          end

          # @param count [Integer] of features
          def check_features(target, input, count, what)
            return if input.dim.positive? && input.shape.last == count

            raise ArgumentError, "#{target}: expected #{what}, with #{count} features in the last dimension, got a tensor of " \
              "shape #{input.shape}"
          end

          # All processes' indices.
          def indices(target, input, placement, group)
            Redistribution.call(target, input, placement, placement.is_a?(Shard) ? WHOLE : placement, group)
          end
        end
        private_constant :LayerStyle

        # Divides the output features of a Linear, or the columns of an Embedding.
        class ColwiseParallel < LayerStyle
          # @param input_layouts [Shard, Replicate, nil] nil: `Tensor.replicate`
          # @param output_layouts [Shard, Replicate, nil] nil: `Tensor.shard(-1)`, which {RowwiseParallel} takes
          # @param blocks [Integer] how many equal blocks the features consist of, each of which is divided: 3 for a fused query, key
          #   and value
          # @param heads [Integer, nil] how many attention heads the features of a block are, none of which may be divided
          def initialize(input_layouts: nil, output_layouts: nil, blocks: 1, heads: nil)
            super()
            @input = placement("input_layouts", input_layouts, WHOLE)
            @output = placement("output_layouts", output_layouts, FEATURES)
            {blocks: blocks, heads: heads || 1}.each do |name, value|
              next if value.is_a?(Integer) && value.positive?

              raise ArgumentError, "#{name}: expected a positive Integer, got #{value.inspect}"
            end
            @blocks = blocks
            @heads = heads
          end

          # @api private
          def layouts(target, group)
            dims = (kind(target) == Torch::NN::Embedding) ? {"weight" => 1} : {"weight" => 0, "bias" => 0}
            unless @heads.nil? || (@heads % group.size).zero?
              raise ArgumentError, "#{target}: heads: expected a multiple of #{group.size} processes, got #{@heads}"
            end

            layouts_of(target, group, target.mod.named_parameters(recurse: false), dims, blocks: @blocks)
          end

          # @api private
          def run(target, group, inputs, kwargs, forward)
            input = input_of(target, inputs, kwargs)
            output = embedding?(target) ? forward.call([indices(target, input, @input, group)], {}) : linear(target, group, input)
            Redistribution.call(target, output, FEATURES, @output, group)
          end

          private

          def linear(target, group, input)
            weight, bias = parameters_of(target.mod)
            dim = Redistribution.dimension(target, input, @input)
            if @input == PARTIAL || dim == input.dim - 1
              input = Redistribution.call(target, input, @input, PARTIAL, group)
              check_features(target, input, weight.shape[1], "the whole input")
              return NN.linear(input, weight, bias)
            end

            check_features(target, input, weight.shape[1], "the whole input")
            NN.column_linear(input, weight, bias, sequence_dim: dim, group: group)
          end
        end

        # Divides the input features of a Linear, or the rows of an Embedding: its vocabulary.
        class RowwiseParallel < LayerStyle
          # @param input_layouts [Shard, Replicate, nil] nil: `Tensor.shard(-1)`, which {ColwiseParallel} gives; for an Embedding
          #   `Tensor.replicate`
          # @param output_layouts [Shard, Replicate, nil] nil: `Tensor.replicate`
          def initialize(input_layouts: nil, output_layouts: nil)
            super()
            @input = placement("input_layouts", input_layouts)
            @output = placement("output_layouts", output_layouts, WHOLE)
            raise ArgumentError, "output_layouts: expected Tensor.replicate or a Tensor.shard, got #{@output}" if @output == PARTIAL
          end

          # @api private
          def layouts(target, group)
            dim = (kind(target) == Torch::NN::Linear) ? 1 : 0
            if target.mod.instance_variable_get(:@scale_grad_by_freq)
              raise ArgumentError, "#{target}: expected an Embedding without scale_grad_by_freq, which needs all its rows"
            end
            layouts_of(target, group, target.mod.named_parameters(recurse: false), {"weight" => dim})
          end

          # @api private
          def run(target, group, inputs, kwargs, forward)
            input = input_of(target, inputs, kwargs)
            embedding?(target) ? lookup(target, group, input, forward) : linear(target, group, input)
          end

          private

          def linear(target, group, input)
            weight, bias = parameters_of(target.mod)
            input = Redistribution.call(target, input, @input || FEATURES, FEATURES, group)
            check_features(target, input, weight.shape[1], "this process's part of the input")
            dim = sequence_dim(target, input, group)
            output = NN.row_linear(input, weight, bias, sequence_dim: dim, group: group)
            dim ? output : Redistribution.call(target, output, WHOLE, @output, group)
          end

          # Among the rows that this process has; others are zeros.
          def lookup(target, group, input, forward)
            ids = indices(target, input, @input || WHOLE, group)
            rows = target.mod.instance_variable_get(:@weight).shape[0]
            VocabularyPart.check(target, ids, rows * group.size)
            return forward.call([ids], {}) if group.size == 1

            part = VocabularyPart.new(ids, rows, group)
            summand = part.keep(embedding(target.mod, part.places, rows * group.rank))
            dim = sequence_dim(target, summand, group)
            return NN.reduce_scatter_to_region(summand, dim: dim, group: group) if dim

            Redistribution.call(target, NN.reduce_from_region(summand, group: group), WHOLE, @output, group)
          end

          def embedding(mod, places, first)
            weight, padding, sparse = %i[@weight @padding_idx @sparse].map { |name| mod.instance_variable_get(name) }
            padding -= first if padding
            padding = nil unless padding&.between?(0, weight.shape[0] - 1)
            Torch::NN::F.embedding(places, weight, padding_idx: padding, sparse: sparse)
          end

          # @return [Integer, nil] the dimension along which sums are divided at once
          def sequence_dim(target, tensor, group)
            dim = Redistribution.dimension(target, tensor, @output)
            return if dim.nil? || dim == tensor.dim - 1

            Redistribution.check(target, tensor, dim, group)
            dim
          end
        end

        # Indices of a vocabulary of which each process has equally many, in the order of the ranks.
        #
        # @api private
        class VocabularyPart
          # A process that does not have an index can't know that none has it. On a GPU this would have to wait for it.
          #
          # @raise [ArgumentError] naming an index that is not one of `count`
          def self.check(place, ids, count)
            return if ids.numel.zero? || !ids.device.to_s.start_with?("cpu")

            wrong = [ids.min, ids.max].map(&:item).find { |each| !each.between?(0, count - 1) }
            raise ArgumentError, "#{place}: expected indices from 0 to #{count - 1}, got #{wrong}" if wrong
          end

          # @return [Torch::Tensor] each index's place in this process's part; 0 for those that it does not have
          attr_reader :places

          # @param count [Integer] how many this process has
          def initialize(ids, count, group)
            local = ids - count * group.rank
            @outside = local.lt(0).logical_or(local.ge(count))
            @places = local.masked_fill(@outside, 0)
          end

          # @param values [Torch::Tensor] one for each index, or a row
          # @return [Torch::Tensor] zeros for those that this process does not have
          def keep(values)
            values.masked_fill((values.dim > @outside.dim) ? @outside.unsqueeze(-1) : @outside, 0)
          end
        end
        private_constant :VocabularyPart
      end
    end
  end
end
