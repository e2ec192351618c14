# frozen_string_literal: true

module Torch
  module Distributed
    # The parent's view of a worker process.
    #
    # @api private
    class Worker
      # Failures that often are another worker's failure, seen from here.
      CONSEQUENCES = %w[PeerLostError GroupError NetworkError TimeoutError StoreError].map { |name| "Torch::Distributed::#{name}" }.freeze
      private_constant :CONSEQUENCES

      attr_reader :rank, :pid, :reader

      # @param reader [IO] this end of the pipe
      def initialize(rank, pid, reader)
        @rank = rank
        @pid = pid
        @reader = reader
        @bytes = String.new(encoding: Encoding::BINARY)
      end

      # Takes what has come, and the process if it has ended.
      def poll
        return if done?

        read
        reap
      end

      # @return [Boolean] whether nothing more can come of it
      def done?
        !@status.nil?
      end

      def failed?
        done? && !(@status.success? && result?)
      end

      # @return [Boolean] whether its failure explains itself
      def cause?
        !CONSEQUENCES.include?(report[:class])
      end

      # @return [Object] the block's value
      def value
        Marshal.load(@bytes)
      end

      # @return [WorkerError]
      def error
        WorkerError.new(message, rank: @rank, worker_class: report[:class], worker_backtrace: report[:backtrace] || [])
      end

      # Signals its whole process group.
      def signal(name)
        Process.kill(name, -@pid)
      rescue Errno::ESRCH, Errno::EPERM
        begin
          Process.kill(name, @pid) unless done?
        rescue Errno::ESRCH
          # It ended meanwhile, and {#reap} will see it.
        end
      end

      # Waits for the process.
      def wait
        @status ||= Process.wait2(@pid)[1]
      ensure
        @reader.close
      end

      private

      def reap
        @status = Process.wait2(@pid, Process::WNOHANG)&.last
        return unless @status

        # What it wrote last may not have been read yet; a process that it started may hold the pipe open.
        read
        @reader.close
      end

      def read
        until @reader.closed?
          chunk = @reader.read_nonblock(1 << 16, exception: false)
          return if chunk == :wait_readable
          return @reader.close if chunk.nil?

          @bytes << chunk
        end
      end

      def result?
        !@bytes.empty?
      end

      def report
        @report ||= begin
          found = (result? && !@status&.success?) ? Marshal.load(@bytes) : {}
          found.is_a?(Hash) ? found : {}
        rescue ArgumentError, TypeError
          {}
        end
      end

      def message
        who = "rank #{@rank} (process #{@pid})"
        return "#{who} failed: #{report[:error]}\n  #{Array(report[:backtrace]).join("\n  ")}" if report[:error]
        return "#{who} was killed by SIG#{Signal.signame(@status.termsig)}" if @status.signaled?

        "#{who} ended with status #{@status.exitstatus} before the block's value came"
      end
    end
  end
end
