# frozen_string_literal: true

require_relative "../tensor"
require_relative "../module_hooks"
require_relative "../nn"
require_relative "parallel/redistribution"
require_relative "parallel/plan"
require_relative "parallel/division"
require_relative "parallel/styles"
require_relative "parallel/linear_styles"
require_relative "parallel/layers"
require_relative "parallel/random"
require_relative "parallel/cross_entropy"

module Torch
  module Distributed
    module Tensor
      # Tensor parallel: the processes of a group have a part of each large layer, and compute with the same inputs. A model is
      # divided by a plan, or made of layers that are divided already:
      #
      #   include Torch::Distributed::Tensor::Parallel # in the class or program that writes the names below
      #   mesh = Torch::Distributed.init_device_mesh("cpu", [2, 4], mesh_dim_names: ["dp", "tp"])
      #   parallelize_module(model, mesh["tp"], {
      #     "layers.*.attention.qkv" => ColwiseParallel.new(blocks: 3), "layers.*.attention.out" => RowwiseParallel.new,
      #     "layers.*.mlp.up" => ColwiseParallel.new, "layers.*.mlp.down" => RowwiseParallel.new
      #   })
      #
      #   up = ColumnParallelLinear.new(512, 2048, mesh: mesh["tp"])
      #
      # All processes of the group run the same program on the same inputs, with the same random numbers, and have the same loss.
      # What is divided gets the gradient of its part; what is not gets the same gradient on all of them. So optimizers need
      # nothing else. Parameters remain the objects that they are and hold this process's part ({Tensor.layout} says which); sizes
      # that a layer knows (`in_features`) stay those of the whole layer.
      #
      # Attention: a process has some of the heads, so a module views what it has projected by the size of a head, and takes
      # their number from the tensor:
      #
      #   query, key, value = @qkv.call(x).chunk(3, -1).map { |part| part.view(batch, length, -1, @head_size).transpose(1, 2) }
      #   ...
      #   @out.call(mixed.transpose(1, 2).reshape(batch, length, -1))
      #
      # Sequence parallel: between the divided layers each process has a part of the sequence. A divided layer's input is put
      # together from the parts, and its output divided again:
      #
      #   sequence = Torch::Distributed::Tensor.shard(1)
      #   "norm" => SequenceParallel.new, "mlp.up" => ColwiseParallel.new(input_layouts: sequence),
      #   "mlp.down" => RowwiseParallel.new(output_layouts: sequence)
      module Parallel
        class << self
          # How many of something each process has, such as heads.
          #
          # @param count [Integer] of all
          # @param mesh [DeviceMesh, nil] of one dimension; nil: all processes
          # @return [Integer]
          # @raise [ArgumentError] naming both numbers, if the processes cannot share them evenly
          def local(count, mesh = nil)
            group = group_of(mesh)
            return count / group.size if (count % group.size).zero?

            raise ArgumentError, "expected a multiple of #{group.size} processes, got #{count}"
          end

          # @param mod [Torch::NN::Module]
          # @return [Boolean] whether its call is that of a layer of this module, or of one that a plan names
          def parallelized?(mod)
            !mod.instance_variable_get(Division::STYLE).nil?
          end

          # Divides modules of a model. A collective call of the mesh's processes, which have the same model and plan.
          #
          #   parallelize_module(model, mesh["tp"], "mlp.up" => ColwiseParallel.new, "mlp.down" => RowwiseParallel.new)
          #
          # @overload parallelize_module(mod, device_mesh, parallelize_plan, src_data_rank: 0)
          # @overload parallelize_module(mod, device_mesh, src_data_rank: 0, **parallelize_plan)
          # @param mod [Torch::NN::Module] the model, or a part of it
          # @param device_mesh [DeviceMesh] of one dimension
          # @param parallelize_plan [ParallelStyle, Hash{String => ParallelStyle}] the module's own style, or those of modules in it, by
          #   names as in its `named_modules`. `*`, `?` and `[0-3]` stand for parts of a name between two dots; "" is the module itself.
          # @param src_data_rank [Integer, nil] the rank in the mesh whose values of the plan's parameters all take; nil: each keeps
          #   its own part of its own values, and nothing is sent of them
          # @return [Torch::NN::Module] `mod`
          # @raise [ArgumentError, TypeError] before anything is changed: names that match nothing, modules that the style does not
          #   know, sizes that the processes cannot share, parameters that are divided already, or shared with a module that
          #   the plan does not name
          # @raise [MismatchError] if another process has a different model or plan, or raises one of these
          def parallelize_module(mod, device_mesh, parallelize_plan = nil, src_data_rank: 0, **named)
            raise TypeError, "device_mesh: expected a DeviceMesh, got #{device_mesh.inspect}" unless device_mesh.is_a?(DeviceMesh)

            Division.new("parallelize_module", group_of(device_mesh, "device_mesh"), src_data_rank).run do
              raise TypeError, "module: expected a Torch::NN::Module, got #{mod.inspect}" unless mod.is_a?(Torch::NN::Module)

              [mod, Plan.new(mod, parallelize_plan || named).targets]
            end
            mod
          end

          # @api private
          # @return [ProcessGroup]
          def group_of(mesh, name = "mesh")
            return Distributed.send(:member_group, nil, "tensor parallel") if mesh.nil?
            raise TypeError, "#{name}: expected a DeviceMesh or nil, got #{mesh.inspect}" unless mesh.is_a?(DeviceMesh)
            raise ArgumentError, "#{name}: expected one dimension, such as mesh[\"tp\"], got #{mesh.inspect}" unless mesh.ndim == 1

            group = mesh.get_group(0)
            raise ArgumentError, "#{name}: process #{mesh.get_rank} is not in #{mesh.inspect}" unless group.is_a?(ProcessGroup)

            group
          end
        end

        private

        # @see Parallel.parallelize_module
        def parallelize_module(...)
          Parallel.parallelize_module(...)
        end
      end
    end
  end
end
