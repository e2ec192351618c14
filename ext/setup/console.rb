# frozen_string_literal: true

require "fileutils"
require "stringio"

module Setup
  ROOT = File.expand_path("../..", __dir__)
  LOG_DIR = File.join(ROOT, "build/log")

  # A step that failed. Its text names the step, the log and the likely cure.
  class Failure < StandardError; end

  # A step that did not end within its limit.
  class TooLong < Failure; end

  # Prints progress: one line a step with the time it took. The output of commands goes to build/log.
  module Console
    HEARTBEAT = 30

    module_function

    def now
      Process.clock_gettime(Process::CLOCK_MONOTONIC)
    end

    def say(*lines)
      output.puts(*lines)
      output.flush
    end

    # What this thread prints to.
    def output
      Thread.current.thread_variable_get(:setup_output) || $stdout
    end

    # Keeps what this thread prints from here on, instead of showing it.
    #
    # @return [String] what the block printed
    def captured
      text = Thread.current.thread_variable_set(:setup_output, StringIO.new(+""))
      yield
      text.string
    end

    # "4.2 s" or "3 min 07 s"
    def duration(seconds)
      return format("%.1f s", seconds) if seconds < 59.95

      format("%d min %02d s", *seconds.round.divmod(60))
    end

    # Runs one command that has to succeed.
    #
    # @param title [String] what the user reads
    # @param cure [String] what most likely helps when it fails
    # @param options as of {run}
    # @raise [Failure]
    def step(title, *command, log:, cure:, **options)
      say "#{title} ..."
      started = now
      status, output = run(*command, log: log, **options)
      unless status&.success?
        raise status ? Failure : TooLong, "step failed (#{ending(status)}): #{title}\n  from its log:\n#{excerpt(output)}\n  " \
          "log: build/log/#{log}.log\n  likely cure: #{cure}"
      end
      say "  done in #{duration(now - started)}"
    end

    # Runs one command as a process group of its own, with its output in a log.
    #
    # @param log [String] name of the log in build/log, without folder and extension
    # @param limit [Numeric] seconds
    # @param show [Boolean] whether the output is shown as well
    # @return [Array(Process::Status, String)] the output is the second; the status is nil if the command ran past `limit`
    def run(*command, log:, env: {}, chdir: ROOT, limit: 3600, show: false)
      path = open_log(log, command)
      File.open(path, encoding: "UTF-8") do |reader|
        reader.seek(0, IO::SEEK_END)
        text = +""
        started = heard = now
        follow = lambda do
          text << (piece = reader.read)
          output.write(piece) && output.flush if show && !piece.empty?
          next if show || now - heard < HEARTBEAT

          heard = now
          say "  still running after #{duration(now - started)}"
        end
        status = wait(spawn(env, *command, in: File::NULL, out: [path, "a"], err: %i[child out], chdir: chdir, pgroup: true), limit, &follow)
        follow.call
        [status, text.scrub]
      end
    end

    # @param status [Process::Status, nil] as {run} returns it
    def ending(status)
      return "took too long" unless status

      status.exitstatus ? "exit #{status.exitstatus}" : "by signal #{status.termsig}"
    end

    # Commands of this process that share a log follow each other in it.
    def open_log(name, command)
      path = File.join(LOG_DIR, "#{name}.log")
      FileUtils.mkdir_p(LOG_DIR)
      @logs ||= []
      File.write(path, "$ #{command.join(" ")}\n", mode: @logs.include?(path) ? "a" : "w")
      @logs << path
      path
    end

    # Waits for the leader of a process group. Past the limit, and when this thread is interrupted, it ends the whole group.
    def wait(pid, limit)
      deadline = now + limit
      until Process.wait(pid, Process::WNOHANG)
        break say("  more than #{duration(limit)}: ending it") if now > deadline

        yield
        sleep 0.02
      end
      $? if $?&.pid == pid
    ensure
      stop(pid) unless $?&.pid == pid
    end

    def stop(pid)
      Process.kill(:TERM, -pid)
      deadline = now + 10
      sleep 0.05 until Process.wait(pid, Process::WNOHANG) || now > deadline
      Process.kill(:KILL, -pid)
      Process.wait(pid)
    rescue Errno::ESRCH, Errno::ECHILD
      nil
    end

    # The last lines, and before them the first errors: parallel builds bury an error under later output.
    def excerpt(output)
      lines = output.lines.map { |line| "    #{line.chomp}" }
      errors = lines.last(200).grep(/error|\*\*\*/i).first(8) - lines.last(15)
      errors << "    [...]" if errors.any?
      [*errors, *lines.last(15)].join("\n")
    end

    private_class_method :open_log, :wait, :stop, :excerpt
  end
end
