# frozen_string_literal: true

require "io/wait"
require "json"
require "socket"

module Partner
  # Runs Python scripts in forks of one Python that has loaded PyTorch (forks.py): loading it takes a second or more. It
  # ends with this process.
  class Forks
    # A script that runs.
    class Run
      # @return [Integer]
      attr_reader :pid
      # @return [IO] standard output and error
      attr_reader :output

      def initialize(output, report)
        @output = output
        @report = report
        @pid = Integer(@report.gets || raise("the Python that has loaded PyTorch is gone"))
      end

      # Waits for its end.
      #
      # @return [Integer] its exit status; a negative one is the signal that ended it
      def status
        @status ||= Integer(@report.gets || raise("the process that watches a Python script is gone"))
      end

      def running?
        @status.nil? && !@report.wait_readable(0)
      end

      # Ends it, if it has not ended.
      def close
        kill if running?
        [@output, @report].each(&:close)
      end

      private

      def kill
        Process.kill(:KILL, @pid)
      rescue Errno::ESRCH
        nil # It has just ended.
      end
    end

    # @param python [Array<String>] the command
    def initialize(python)
      @socket, theirs = UNIXSocket.pair(:SEQPACKET)
      Process.detach(Process.spawn(*python, File.expand_path("forks.py", __dir__), theirs.fileno.to_s, theirs => theirs))
      theirs.close
    end

    # @param script [String] its path
    # @return [Run]
    def run(script, *arguments)
      output, writes = IO.pipe
      report, tells = IO.pipe
      @socket.sendmsg(JSON.generate([script, *arguments.map(&:to_s)]), 0, nil, Socket::AncillaryData.unix_rights(writes, tells))
      [writes, tells].each(&:close)
      Run.new(output, report)
    end
  end
end
