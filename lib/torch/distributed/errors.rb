# frozen_string_literal: true

module Torch
  module Distributed
    # PyTorch's default for groups and stores: thirty minutes, in seconds.
    DEFAULT_TIMEOUT = 30 * 60

    # What goes wrong in Torch::Distributed. The classes beneath it stand for libtddp's statuses and
    # say what is broken afterwards: an argument ({InvalidArgumentError}, {UnsupportedError}), one operation
    # ({TimeoutError}, {MismatchError}), the process group ({PeerLostError}, {GroupError}: destroy it), a store
    # ({NetworkError}, {StoreError}) or this installation ({UnavailableError}, {SystemError}).
    class Error
      # @!attribute [r] status
      #   @return [Symbol, nil] libtddp's name for the failure, :TDDP_TIMEOUT for instance
    end

    # A process of {Torch::Distributed.fork_world} failed.
    class WorkerError < Error
      # @return [Integer] the rank of the process that failed first
      attr_reader :rank

      # @return [String, nil] the class of the exception that the block raised there
      attr_reader :worker_class

      # @return [Array<String>] where it was raised
      attr_reader :worker_backtrace

      # @api private
      def initialize(message, rank: nil, worker_class: nil, worker_backtrace: [])
        super(message)
        @rank = rank
        @worker_class = worker_class
        @worker_backtrace = worker_backtrace
      end
    end
  end
end
