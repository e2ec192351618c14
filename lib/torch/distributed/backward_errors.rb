# frozen_string_literal: true

module Torch
  module Distributed
    # What ends a backward as the {Error} that it is. Torch-rb raises the text of C++ exceptions alone, as a RuntimeError.
    #
    # @api private
    module BackwardErrors
      class << self
        # @yield what runs libtorch's backward
        def named
          before = $! # rubocop:disable Style/SpecialGlobalVars -- it would be the cause of what torch-rb raises
          yield
        rescue Error
          raise
        rescue => e
          within = e.cause unless e.cause.equal?(before)
          raise within.exception(e.message), cause: within if within.is_a?(Error)

          error = Distributed.send(:_failure, e.message) unless within
          error ? raise(error, cause: e) : raise
        end
      end

      # Around Torch::Tensor#backward.
      module Backward
        def backward(...)
          BackwardErrors.named { super }
        end
      end

      # YARD, which does not know torch-rb's classes, leaves blocks alone.
      Torch::Tensor.class_eval { prepend Backward }
    end
  end
end
