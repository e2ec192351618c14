# frozen_string_literal: true

module Torch
  module Distributed
    # PyTorch's default for groups and stores: thirty minutes, in seconds.
    DEFAULT_TIMEOUT = 30 * 60

    # What goes wrong in Torch::Distributed. The classes beneath it stand for libtddp's statuses and
    # say what is broken afterwards: an argument ({InvalidArgumentError}, {UnsupportedError}), one operation
    # ({TimeoutError}, {MismatchError}), the process group ({PeerLostError}, {GroupError}: destroy it), a store
    # ({NetworkError}, {StoreError}) or this installation ({UnavailableError}, {SystemError}).
    #
    # @!attribute [r] status
    #   @return [Symbol, nil] libtddp's name for the failure, :TDDP_TIMEOUT for instance
    class Error < Torch::Error; end

    # An argument was refused before anything was sent.
    class InvalidArgumentError < Error; end

    # The backend, the dtype or the device does not have this operation.
    class UnsupportedError < Error; end

    # An operation, or a wait, took longer than its timeout.
    class TimeoutError < Error; end

    # A wait was interrupted.
    class CanceledError < Error; end

    # Something that was asked for without waiting is not there.
    class NotFoundError < Error; end

    # Ranks called different operations, or have different models: the message has both.
    class MismatchError < Error; end

    # A process of the group ended, or its host cannot be reached.
    class PeerLostError < Error; end

    # The group has failed before, was destroyed, or belongs to the process from which this one was forked.
    class GroupError < Error; end

    # An address cannot be reached or is in use, or a connection broke.
    class NetworkError < Error; end

    # The store failed, or what answers is none.
    class StoreError < Error; end

    # A system call failed.
    class SystemError < Error; end

    # Memory is used up.
    class OutOfMemoryError < Error; end

    # A backend or a library is not in this installation.
    class UnavailableError < Error; end

    # A fault of torch-ddp itself.
    class InternalError < Error; end

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
