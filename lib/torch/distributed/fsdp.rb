# frozen_string_literal: true

require_relative "../distributed"
require_relative "module_hooks"
require_relative "../nn/parallel/wrapper"
require_relative "fsdp/building"
require_relative "fsdp/policies"
require_relative "fsdp/parameters"
require_relative "fsdp/sharded_parameter"
require_relative "fsdp/state"
require_relative "fsdp/forward_methods"
require_relative "fsdp/unit"
require_relative "fsdp/fsdp_module"
require_relative "fsdp/state_dict"
require_relative "fsdp/optim_state_dict"
require_relative "fsdp/fully_sharded_data_parallel"

module Torch
  module Distributed
    # Fully sharded training: each process holds a part of every parameter, of its gradient and of the optimizer's state.
    # A part of the model, a unit, is gathered when it runs, forwards and backwards, and freed again.
    #
    #   model.layers.each { |layer| Torch::Distributed::FSDP.fully_shard(layer) }
    #   Torch::Distributed::FSDP.fully_shard(model)
    #   optimizer = Torch::Optim::AdamW.new(model.parameters, lr: 1e-3)
    #
    # The parameters remain the objects that they are, and each a {ShardedParameter}: it has the shape of the model's parameter, and
    # outside of forward and backward the elements of this process's piece; while its unit runs it is the whole parameter.
    module FSDP
      # PyTorch's name. All ranks of a {GradScaler} leave out the same steps in any case.
      ShardedGradScaler = GradScaler

      class << self
        # Shards the parameters of a module that no unit has yet, as one unit. To be called for the parts of a model first,
        # and for the model itself last; before its first forward. A collective call of the mesh's processes, which have to
        # hold the same values: each keeps its piece of its own.
        #
        # @param mod [Torch::NN::Module, Array<Torch::NN::Module>] several are one unit, gathered for each of them
        # @param mesh [DeviceMesh, nil] of one dimension, along which parameters are sharded; of two: replicated along the
        #   first, sharded along the second. nil: all processes
        # @param reshard_after_forward [Boolean, nil] whether the unit is freed between forward and backward. nil: unless it is
        #   the model itself, which backward needs first
        # @param mp_policy [MixedPrecisionPolicy]
        # @param offload_policy [OffloadPolicy]
        # @param ignored_params [Enumerable<Torch::NN::Parameter>] that remain as they are
        # @return [Object] `mod`, which has the methods of {FSDPModule} now
        # @raise [ArgumentError, TypeError] naming the argument that is wrong; before anything is sent
        # @raise [MismatchError] if the processes differ in the unit's parameters or options
        def fully_shard(mod, mesh: nil, reshard_after_forward: nil, mp_policy: MixedPrecisionPolicy.new,
          offload_policy: OffloadPolicy.new, ignored_params: [])
          shard(mod, groups: groups_of(mesh), reshard_after_forward: reshard_after_forward, mp_policy: mp_policy,
            offload_policy: offload_policy, ignored_params: ignored_params)
        end

        # Makes a model that no process could hold: each module of these classes is sharded as soon as it is made, before the next
        # one is, and the model itself at last. A collective call; all processes make the same model, with the same random numbers.
        #
        #   Torch.manual_seed(1)
        #   model = FSDP.build(Block, mp_policy: policy) { Gpt.new(layers: 96) }
        #
        # @param classes [Array<Class>] of the modules that become units; Ruby's classes, not those that C defines
        # @param options [Hash] of {#fully_shard}
        # @yieldreturn [Torch::NN::Module] the model
        # @return [Torch::NN::Module]
        # @raise [ArgumentError] if the classes are none, or no module of them was made
        def build(*classes, **options)
          classes = classes.flatten
          unless !classes.empty? && classes.all? { |each| each.is_a?(Class) && each <= Torch::NN::Module }
            raise ArgumentError, "classes: expected some of modules, got #{classes.inspect}"
          end

          made = 0
          building = Building.new(classes) do |mod|
            bytes = mod.parameters.uniq(&:object_id).sum { |each| LocalPiece.numel(each) * each.element_size }
            fully_shard(mod, **options)
            # Objects of Ruby's still hold what the parameters were made of.
            StepMemory.instance.left(bytes)
            made += 1
          end
          model = building.during { yield }
          raise ArgumentError, "classes: the block has made no #{classes.join(", nor a ")}" if made.zero?

          model.is_a?(FSDPModule) ? model : fully_shard(model, **options)
        end

        # @api private
        # @return [Boolean] whether a unit has the parameter
        def sharded?(parameter)
          !Unit.owner(parameter).nil?
        end

        # @api private
        # @return [ProcessGroup, nil] whose processes have a piece of the parameter each
        def group_of(parameter)
          Unit.owner(parameter)&.group
        end

        # @api private
        # @param groups [Array<ProcessGroup>] those of shards, and of replicas or nil
        # @param name [String, nil] of the unit, for messages
        def shard(mod, groups:, reshard_after_forward: nil, mp_policy: MixedPrecisionPolicy.new, offload_policy: OffloadPolicy.new,
          ignored_params: [], name: nil)
          modules = modules_of(mod)
          expect(:reshard_after_forward, reshard_after_forward, "true, false or nil", [true, false, nil].include?(reshard_after_forward))
          expect(:mp_policy, mp_policy, "a MixedPrecisionPolicy", mp_policy.is_a?(MixedPrecisionPolicy))
          expect(:offload_policy, offload_policy, "an OffloadPolicy", offload_policy.is_a?(OffloadPolicy))
          parts = modules.flat_map { |each| each.modules.to_a }.filter_map { |each| Unit.of(each) }.uniq
          parameters = Parameters.new(modules, ignored_params)
          state = State.merge((parts + parameters.lenders).map(&:state).uniq)
          Unit.new(state, modules, parameters, groups, name: name, reshard: reshard_after_forward, precision: mp_policy,
            offload: offload_policy)
          modules.each { |each| each.extend(FSDPModule) }
          mod
        end

        # @param mesh [DeviceMesh, nil]
        # @return [Array<ProcessGroup, nil>] those of shards, and of replicas or nil
        def groups_of(mesh)
          return [Distributed.send(:member_group, nil, "fully_shard"), nil] if mesh.nil?
          raise TypeError, "mesh: expected a DeviceMesh, got #{mesh.inspect}" unless mesh.is_a?(DeviceMesh)
          unless [1, 2].include?(mesh.ndim)
            raise ArgumentError, "mesh: expected one dimension, or two (replicate, shard), got #{mesh.ndim}"
          end

          groups = Array.new(mesh.ndim) { |dim| mesh.get_group(dim) }
          raise ArgumentError, "mesh: process #{mesh.get_rank} is not in it" unless groups.all?(ProcessGroup)

          (groups.size == 1) ? [groups.first, nil] : [groups.last, groups.first]
        end

        private

        def expect(name, value, expected, right)
          raise ArgumentError, "#{name}: expected #{expected}, got #{value.inspect}" unless right
        end

        def modules_of(mod)
          modules = mod.is_a?(Array) ? mod : [mod]
          raise ArgumentError, "module: expected one or several, got none" if modules.empty?

          modules.each do |each|
            raise TypeError, "module: expected a Torch::NN::Module, got #{each.inspect}" unless each.is_a?(Torch::NN::Module)
            if each.is_a?(Torch::NN::ModuleList)
              raise ArgumentError, "module: a #{each.class} has no forward of its own: shard the modules in it"
            end
            raise ArgumentError, "module: this #{each.class} is a unit already: shard each once" if each.is_a?(FSDPModule)
          end
        end
      end
    end
  end
end
