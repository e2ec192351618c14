# frozen_string_literal: true

module Torch
  module Distributed
    # Where the library's log lines go: to standard error, or to a Logger.
    #
    #   Torch::Distributed.logger = Logger.new($stdout, progname: "rank #{rank}")
    module Log
      # Lines for people are of `TDDP_LOG`'s levels, in its order.
      SEVERITIES = [3, 2, 1, 0].freeze # Logger::ERROR, WARN, INFO, DEBUG
      WARNING = 2
      PROGRAM = "torch-ddp"
      private_constant :SEVERITIES, :WARNING, :PROGRAM

      # @return [Logger, #add, nil] nil: lines go to standard error
      attr_reader :logger

      # Has lines of the library, those of its threads too, logged by `logger`, with the severities error, warn, info and debug. The
      # environment variable `TDDP_LOG` decides which lines there are at all (`warn` and worse without it), the logger's level which of
      # them it shows. A thread of Ruby calls the logger; what was logged before has reached the previous logger when this returns.
      #
      # A forked child has the same logger: for lines of libtddp from its `init_process_group` on.
      #
      # @param logger [Logger, #add, nil] what has a method `add(severity, message, progname)`; nil: standard error
      # @return [Logger, nil]
      # @raise [TypeError]
      def logger=(logger)
        unless logger.nil? || logger.respond_to?(:add)
          raise TypeError, "logger: expected a Logger, something else with a method `add(severity, message, progname)`, or nil, got #{logger.inspect}"
        end

        stop_log
        @logger = logger
        start_log if logger
      end

      # A warning of the library's Ruby code.
      #
      # @api private
      def _warn(text)
        text = TorchDDP.printable(text)
        @logger ? @logger.add(WARNING, text.delete_prefix("#{PROGRAM}: "), PROGRAM) : warn(text)
      end

      private

      # In a forked child there is neither the thread, nor a pipe of its own.
      def continue_log
        start_log if @logger && @log_pid != Process.pid
      end

      def start_log
        unless @log_pid == Process.pid
          @log_pipe = IO.pipe(binmode: true)
          @log_pid = Process.pid
          at_exit { stop_log }
        end
        @log_thread = read_log(@log_pipe.first, @logger)
        _log_to(@log_pipe.last.fileno)
      end

      # What was logged before has reached the logger then.
      def flush_log
        return unless @log_pid == Process.pid && @log_thread

        stop_log
        start_log
      end

      # An empty line ends the thread, after all those before it.
      def stop_log
        return unless @log_pid == Process.pid && @log_thread

        _log_to(nil)
        @log_pipe.last.write("\0")
        @log_thread.join
        @log_thread = nil
      end

      def read_log(pipe, logger)
        Thread.new do
          until (line = pipe.gets("\0", chomp: true)).empty?
            text = line.byteslice(1..).force_encoding(Encoding::UTF_8).scrub
            begin
              logger.add(SEVERITIES.fetch(line.to_i), text, PROGRAM)
            rescue => e
              warn "#{PROGRAM}: the logger failed: #{e.message} (#{e.class}); #{text}"
            end
          end
        end.tap { |thread| thread.name = "torch-ddp log" }
      end
    end
  end
end
