# frozen_string_literal: true

module Torch
  module Distributed
    module Elastic
      # How a worker ended.
      #
      # @!attribute [r] local_rank
      #   @return [Integer]
      # @!attribute [r] pid
      #   @return [Integer]
      # @!attribute [r] exitcode
      #   @return [Integer] the exit status, or the negated number of the signal that killed it
      # @!attribute [r] signal
      #   @return [String, nil] that signal's name
      # @!attribute [r] message
      #   @return [String, nil] the exception, if it is known
      # @!attribute [r] traceback
      #   @return [String, nil]
      # @!attribute [r] timestamp
      #   @return [Integer] when, in seconds since 1970
      ProcessFailure = Struct.new(:local_rank, :pid, :exitcode, :signal, :message, :traceback, :timestamp, keyword_init: true) do
        # @return [String]
        def to_s
          ending = signal ? "was killed by #{signal}" : "ended with status #{exitcode}"
          message ? "#{ending}: #{message}" : ending
        end
      end

      # Workers that {Elastic.launch} started have failed, as often as they may.
      class ChildFailedError < WorkerError
        # @return [String] the program of the workers
        attr_reader :name

        # @return [Hash{Integer => ProcessFailure}] by rank, the root cause first: this node's workers that failed by themselves in the
        #   last attempt; empty if the root cause is on another node, and none of these
        attr_reader :failures

        # @api private
        # @param attempt [Hash] the last one of torchrun's report
        def self.of(name, attempt)
          failures = attempt.fetch("failures").to_h do |failure|
            known = ProcessFailure.members.to_h { |member| [member, failure[member.to_s]] }
            [failure.fetch("rank"), ProcessFailure.new(**known)]
          end
          rank, first = failures.first
          return new(attempt["elsewhere"], name: name, failures: failures) if attempt["elsewhere"]

          new("rank #{rank} (process #{first.pid}) #{first}", name: name, failures: failures, rank: rank,
            worker_class: first.message&.slice(/\A[A-Z][\w:]*(?=: )/), worker_backtrace: first.traceback.to_s.lines(chomp: true))
        end

        # @api private
        def initialize(message, name: nil, failures: {}, **worker)
          super(message, **worker)
          @name = name
          @failures = failures
        end

        # @return [Array(Integer, ProcessFailure), nil] the root cause and its rank; nil if it is on another node
        def first_failure
          failures.first if rank
        end
        alias_method :get_first_failure, :first_failure
      end
    end
  end
end
