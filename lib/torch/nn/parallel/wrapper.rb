# frozen_string_literal: true

module Torch
  module NN
    module Parallel
      # What modules have in common that train another one, their `module`.
      module Wrapper
        # @return [String] one line, however large the model is: `puts model.module.inspect` shows that
        def inspect
          "#<#{self.class.name} of a #{self.module.class.name}>"
        end
        alias_method :to_s, :inspect

        private

        # What the model has is asked of the model.
        def respond_to_missing?(...)
          super
        end

        # @raise [NoMethodError] which says where the method is, if the model has it
        def method_missing(name, ...)
          inner = self.module
          return super unless inner && !respond_to?(name) && inner.respond_to?(name)

          raise NoMethodError.new("undefined method `#{name}' for a #{self.class.name}: the #{inner.class.name} within it has it, so call " \
            "model.module.#{name}", name)
        end
      end
    end
  end
end
