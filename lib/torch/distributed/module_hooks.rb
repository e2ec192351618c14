# frozen_string_literal: true

module Torch
  module Distributed
    # Code around the forward of one module, however it is called from outside: torch-rb calls modules by `call`. Nothing
    # of torch-rb is changed: a hook is a module that is prepended to that one object.
    #
    # @api private
    module ModuleHooks
      class << self
        # @param mod [Torch::NN::Module]
        # @param owner [Object] for messages
        # @param moving [#call, nil] is called around what moves or converts the module, with it; nil: that is refused
        # @yieldparam inputs [Array<Object>]
        # @yieldparam kwargs [Hash<Symbol, Object>]
        # @yieldparam forward [Proc] runs the module with (inputs, kwargs)
        # @yieldreturn [Object] what the call returns
        # @return [void]
        def around(mod, owner, moving: nil, &wrapper)
          mod.singleton_class.prepend(Module.new do
            define_method(:call) do |*inputs, **kwargs, &block|
              wrapper.call(inputs, kwargs, ->(args, options) { super(*args, **options, &block) })
            end

            # Moving a module puts other parameters in the place of those that it has.
            define_method(:_apply) do |*arguments|
              raise ArgumentError, "this #{self.class} has been sharded by #{owner}: move or convert it before that" unless moving

              moving.call(self) { super(*arguments) }
            end

            %i[dup clone deep_dup].each do |name|
              define_method(name) do |*, **|
                raise TypeError, "this #{self.class} has been sharded by #{owner} and cannot be copied: copy it before that"
              end
            end
          end)
        end
      end
    end
  end
end
