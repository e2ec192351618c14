# frozen_string_literal: true

module Torch
  module Distributed
    # Forks of a rank. Their copies of gradients and parameters in shared memory are made for children that go on in Ruby, not for
    # the forks by which Ruby starts other programs (`system`, `spawn`, backticks) in a process of root's.
    #
    # @api private
    module Forks
      # Of `fork`, `Process.fork` and `IO.popen("-")`.
      def _fork
        ProcessGroup._copy_in_forks(true)
        super
      ensure
        ProcessGroup._copy_in_forks(false)
      end

      def daemon(...)
        ProcessGroup._copy_in_forks(true)
        super
      ensure
        ProcessGroup._copy_in_forks(false)
      end

      ProcessGroup._copy_in_forks(false)
      Process.singleton_class.prepend(self)
    end
    private_constant :Forks
  end
end
