# frozen_string_literal: true

module Torch
  module Distributed
    module FSDP
      # Forward, however it is called: by `call`, around which units gather, by other methods that are registered for that, and by those that
      # are not, where there is nothing to compute with.
      #
      # @api private
      module ForwardMethods
        OWNERS = :@_fsdp_owners
        private_constant :OWNERS

        # Before the forward of a class some of whose modules have sharded parameters. Modules get no classes of their own for it:
        # Ruby's caches of methods and instance variables would miss with each of them.
        module Guarded
          # @raise [Error] while parameters of the module are sharded
          def forward(*, **)
            ForwardMethods.refuse(self) if @_fsdp_owners&.any?(&:hidden?)
            super
          end
        end
        private_constant :Guarded

        class << self
          # @api private
          # @param mod [Torch::NN::Module] that has parameters of the unit
          # @param unit [Unit]
          def guard(mod, unit)
            mod.instance_variable_set(OWNERS, [*mod.instance_variable_get(OWNERS), unit])
            of_class = mod.class.ancestors.include?(mod.method(:forward).owner)
            (of_class ? mod.class : mod.singleton_class).prepend(Guarded)
          end

          # @api private
          # @param modules [Class] of modules
          # @return [Module] the class, or what it includes, that defines how they compute
          def owner(modules)
            method = modules.instance_method(:forward)
            method = method.super_method while method.owner == Guarded
            method.owner
          end

          # @api private
          # @raise [Error]
          def refuse(mod)
            raise Error, "forward of this #{mod.class.name}: fully_shard has sharded its parameters, and they are not gathered now: call the model " \
              "(`model.call`, not `model.forward`); a method of the model that runs its layers otherwise, such as `generate`, is registered " \
              "by FSDP.register_fsdp_forward_method(model, :generate)"
          end
        end
      end

      class << self
        # Has a method of a unit gather the unit as `call` does, and free it again: one that calls `forward` itself, or layers of the
        # unit. All processes call it, as often as the others.
        #
        #   FSDP.register_fsdp_forward_method(model, :generate)
        #   model.generate(ids)
        #
        # @param mod [Torch::NN::Module] a unit; with any other module nothing is done, so that a program may run without sharding
        # @param method_name [Symbol, String]
        # @return [void]
        # @raise [ArgumentError] if the module has no such method
        def register_fsdp_forward_method(mod, method_name)
          mod = mod.module if mod.is_a?(FullyShardedDataParallel)
          raise TypeError, "mod: expected a Torch::NN::Module, got #{mod.inspect[0, 80]}" unless mod.is_a?(Torch::NN::Module)

          name = method_name.to_sym
          unless mod.class.method_defined?(name) || mod.singleton_class.method_defined?(name)
            raise ArgumentError, "method_name: expected a method of this #{mod.class.name}, got #{method_name.inspect}"
          end

          unit = Unit.of(mod) or return
          mod.singleton_class.prepend(Module.new do
            define_method(name) do |*inputs, **kwargs, &block|
              unit.run(inputs, kwargs, ->(args, options) { super(*args, **options, &block) })
            end
          end)
        end
      end
    end
  end
end
