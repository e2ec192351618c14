# frozen_string_literal: true

module Torch
  module Distributed
    module Tensor
      module Parallel
        # Layers that are divided from the start.
        #
        # Making one is a collective call of the mesh's processes. It is made whole, as the layer that is not divided would be with
        # the same random numbers, and rank 0's values are taken.
        #
        # @api private
        module Layer
          # @api private
          module From
            # A layer with the parameters of one that is not divided, which is not to be used any more.
            #
            # @param layer [Torch::NN::Module]
            # @param options [Hash] those of `new`, apart from sizes
            # @return [Torch::NN::Module]
            # @raise [ArgumentError, TypeError] if it can't be divided; it is as it was
            def from(layer, mesh: nil, **options)
              raise TypeError, "layer: expected a #{superclass}, got #{layer.inspect}" unless layer.is_a?(superclass)

              raise ArgumentError, "layer: it is divided already" if Parallel.parallelized?(layer)

              allocate.tap do |made|
                layer.instance_variables.each { |name| made.instance_variable_set(name, layer.instance_variable_get(name)) }
                made.send(:divide, mesh, **options)
              end
            end
          end

          def self.included(base)
            base.extend(From)
          end

          private

          def divide(mesh, **options)
            name = self.class.name[/\w+\z/]
            Division.new(name, Parallel.group_of(mesh), 0).run { [self, [Target.new("", self, style(**options))]] }
          end
        end
        private_constant :Layer

        # A Linear whose output features are divided: as {ColwiseParallel}.
        class ColumnParallelLinear < Torch::NN::Linear
          include Layer

          # @param in_features [Integer]
          # @param out_features [Integer] of all processes
          # @param bias [Boolean]
          # @param mesh [DeviceMesh, nil] of one dimension; nil: all processes
          # @param gather_output [Boolean] whether each process gets all output features
          # @param sequence_dim [Integer, nil] the dimension of which each process has a part of the input
          # @param blocks [Integer] see {ColwiseParallel#initialize}
          # @raise [ArgumentError, MismatchError] see {Parallel.parallelize_module}
          def initialize(in_features, out_features, bias: true, mesh: nil, gather_output: false, sequence_dim: nil, blocks: 1)
            super(in_features, out_features, bias: bias)
            divide(mesh, gather_output: gather_output, sequence_dim: sequence_dim, blocks: blocks)
          end

          private

          def style(gather_output: false, sequence_dim: nil, blocks: 1)
            ColwiseParallel.new(blocks: blocks, input_layouts: sequence_dim && Tensor.shard(sequence_dim),
              output_layouts: gather_output ? Tensor.replicate : nil)
          end
        end

        # A Linear whose input features are divided: as {RowwiseParallel}. Its bias is added once, to the sum of all processes.
        class RowParallelLinear < Torch::NN::Linear
          include Layer

          # @param in_features [Integer] of all processes
          # @param out_features [Integer]
          # @param bias [Boolean]
          # @param mesh [DeviceMesh, nil] of one dimension; nil: all processes
          # @param input_is_parallel [Boolean] whether the input has this process's features only, as {ColumnParallelLinear} gives them
          # @param sequence_dim [Integer, nil] the dimension of which each process gets a part of the output
          # @raise [ArgumentError, MismatchError] see {Parallel.parallelize_module}
          def initialize(in_features, out_features, bias: true, mesh: nil, input_is_parallel: true, sequence_dim: nil)
            super(in_features, out_features, bias: bias)
            divide(mesh, input_is_parallel: input_is_parallel, sequence_dim: sequence_dim)
          end

          private

          def style(input_is_parallel: true, sequence_dim: nil)
            RowwiseParallel.new(input_layouts: input_is_parallel ? nil : Tensor.replicate,
              output_layouts: sequence_dim && Tensor.shard(sequence_dim))
          end
        end

        # An Embedding whose rows are divided: each process looks up what it has, and the sum of all is what the whole one gives.
        class VocabParallelEmbedding < Torch::NN::Embedding
          include Layer

          # @param num_embeddings [Integer] of all processes
          # @param embedding_dim [Integer]
          # @param mesh [DeviceMesh, nil] of one dimension; nil: all processes
          # @param sequence_dim [Integer, nil] the dimension of which each process gets a part of the output
          # @param options [Hash] of Torch::NN::Embedding
          # @raise [ArgumentError, MismatchError] see {Parallel.parallelize_module}
          def initialize(num_embeddings, embedding_dim, mesh: nil, sequence_dim: nil, **options)
            super(num_embeddings, embedding_dim, **options)
            divide(mesh, sequence_dim: sequence_dim)
          end

          private

          def style(sequence_dim: nil)
            RowwiseParallel.new(output_layouts: sequence_dim && Tensor.shard(sequence_dim))
          end
        end
      end
    end
  end
end
