# frozen_string_literal: true

require "rbconfig"

module Setup
  # The systems that torch-ddp can be built on.
  module Platform
    # Asked first, since compilers would say the same in a hundred messages. CMakeLists.txt asks as well, for programs in C.
    #
    # @param system [String] as RbConfig names it
    # @return [String, nil] why it cannot be built there
    def self.obstacle(system = RbConfig::CONFIG["host_os"])
      return if system.include?("linux")

      "torch-ddp cannot be built on #{system}: it needs Linux's epoll, eventfd, signalfd, futex, memfd_create and prctl. " \
        "Elsewhere use it in a container: examples/docker in its repository."
    end
  end
end
