# frozen_string_literal: true

module TorchDDP
  # The exception that ends what the caller is in. `$!` alone does not say: within a `rescue` it is what is handled there,
  # and the program goes on.
  module PassingError
    # How Ruby calls the bodies of `rescue` and of `ensure` that it runs because of an exception; an `ensure` that is reached
    # in the normal way is a part of its method.
    HANDLED = "rescue in "
    PASSING = "ensure in "
    private_constant :HANDLED, :PASSING

    class << self
      # @return [Exception, nil] nil: none, or one that is handled
      def current
        error = $!
        error unless error.nil? || handled?
      end

      # The same but for an exit that is none.
      #
      # @return [Exception, nil]
      def failure
        error = current
        error unless error.is_a?(SystemExit) && error.success?
      end

      private

      # In handlers of the process's exit there is neither of them.
      def handled?
        label = caller_locations.map(&:label).find { |each| each.start_with?(HANDLED, PASSING) }
        !label.nil? && label.start_with?(HANDLED)
      end
    end
  end
end
