# frozen_string_literal: true

module Torch
  module Distributed
    # Forks of a rank. Their copies of gradients and parameters in shared memory are made for children that go on in Ruby, not for
    # the forks by which Ruby starts other programs (`system`, `spawn`, backticks) in a process of root's.
    #
    # @api private
    module Forks
      # @yield forks
      def self.copying
        ProcessGroup._copy_in_forks(true)
        yield
      ensure
        ProcessGroup._copy_in_forks(false)
      end

      # Of `fork`, `Process.fork` and `IO.popen("-")`.
      def _fork
        Forks.copying { super }.tap { |child| Distributed.send(:leave_to_parent) if child.zero? }
      end

      def daemon(...)
        Forks.copying { super }.tap { Distributed.send(:leave_to_parent) }
      end

      ProcessGroup._copy_in_forks(false)
      Process.singleton_class.prepend(self)
    end
    private_constant :Forks
  end
end
