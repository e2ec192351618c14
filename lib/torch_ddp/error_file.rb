# frozen_string_literal: true

module TorchDDP
  # What ended a worker, written where its launcher looks for it (TORCHELASTIC_ERROR_FILE), in PyTorch's form: torchrun,
  # ours or Python's, shows it in its report. Needs no torch, and loads JSON only when there is something to write.
  module ErrorFile
    VARIABLE = "TORCHELASTIC_ERROR_FILE"

    # A rank that lost another is not the one to blame: torchrun looks for that other before it reports.
    LOST = %w[Torch::Distributed::PeerLostError Torch::Distributed::GroupError].freeze

    # Launchers read so much of a file, and people less.
    MOST_MESSAGE = 16 * 1024
    MOST_CALLSTACK = 96 * 1024

    class << self
      # Has what ends this process written. Once a process, however often it is called; a child that it forks is not the
      # worker, and does not write.
      def install
        return if @worker == Process.pid

        @worker = Process.pid
        at_exit { write($!) if @worker == Process.pid && reports?($!) }
      end

      # Writes an exception, at once and whole or not at all. The error itself goes its own way: nothing is raised here.
      #
      # @param error [Exception]
      # @return [Boolean] whether it is written, now or before
      def write(error)
        path = ENV[VARIABLE]
        return false if path.nil? || path.empty?
        return true if @written.equal?(error)
        # Another report with more detail is there already.
        return false if @written.nil? && File.exist?(path)

        replace(path, report(error))
        @written = error
        true
      rescue SystemCallError, IOError
        false
      end

      private

      # Programs end by exit, too, and launchers end them by signals: only `abort` has something to say.
      def reports?(error)
        case error
        when nil, SignalException then false
        when SystemExit then !error.success? && error.message != "exit"
        else true
        end
      end

      def replace(path, text)
        fresh = "#{path}.#{Process.pid}.tmp"
        File.write(fresh, text)
        File.rename(fresh, path)
      rescue SystemCallError, IOError
        File.delete(fresh) if File.exist?(fresh)
        raise
      end

      def report(error)
        require "json"
        JSON.generate(message: {
          message: cut("#{error.class}: #{words(error)}", MOST_MESSAGE),
          extraInfo: {py_callstack: cut(callstack(error), MOST_CALLSTACK), timestamp: Time.now.to_i.to_s,
                      consequence: LOST.include?(error.class.name) ? "1" : "0"}
        })
      end

      # An exception's own methods may fail as well.
      def words(error)
        utf8(error.message)
      rescue => e
        "(its message raised #{e.class})"
      end

      def callstack(error)
        utf8(error.full_message(highlight: false, order: :top))
      rescue
        [words(error), *error.backtrace].map { |line| utf8(line) }.join("\n")
      end

      def utf8(text)
        text = text.to_s
        return text.dup.force_encoding(Encoding::UTF_8).scrub if [Encoding::UTF_8, Encoding::BINARY, Encoding::US_ASCII].include?(text.encoding)

        text.encode(Encoding::UTF_8, invalid: :replace, undef: :replace)
      end

      # The beginning says what it is, the end where it came from.
      def cut(text, most)
        return text if text.bytesize <= most

        half = most / 2
        "#{text.byteslice(0, half).scrub("")}\n... #{text.bytesize - 2 * half} bytes left out ...\n#{text.byteslice(-half, half).scrub("")}"
      end
    end
  end
end
