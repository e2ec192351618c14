# frozen_string_literal: true

require "fileutils"

module Setup
  ROOT = File.expand_path("../..", __dir__)
  LOG_DIR = File.join(ROOT, "build/log")

  # A step that could not be done. Its text names the step, the log and the likely cure.
  class Failure < StandardError; end

  # One that was not over within its limit.
  class TooLong < Failure; end

  # What set-up says while it works: one line a step with the time it took, output of commands in build/log.
  module Console
    HEARTBEAT = 30

    module_function

    def now
      Process.clock_gettime(Process::CLOCK_MONOTONIC)
    end

    def say(*lines)
      write(lines.map { |line| line.to_s.end_with?("\n") ? line : "#{line}\n" }.join)
    end

    # Keeps what this thread prints rather than showing it.
    #
    # @return [String] what was printed while the block ran
    def captured
      kept = Thread.current.thread_variable_get(:setup_text)
      text = +""
      Thread.current.thread_variable_set(:setup_text, text)
      yield
      text
    ensure
      Thread.current.thread_variable_set(:setup_text, kept)
    end

    def write(text, to: Thread.current.thread_variable_get(:setup_text) || $stdout)
      to << text
      to.flush if to.respond_to?(:flush)
    end

    # "4.2 s" or "3 min 07 s"
    def duration(seconds)
      return format("%.1f s", seconds) if seconds < 59.95

      format("%d min %02d s", *seconds.round.divmod(60))
    end

    # Runs one command with its output in a log; a long one tells now and then that it is alive.
    #
    # @param title [String] what the user reads
    # @param log [String] name of the log in build/log, without folder and ending
    # @param cure [String] what most likely helps when it fails
    # @raise [Failure]
    def step(title, *command, log:, cure:, env: {}, chdir: ROOT, limit: 3600)
      say "#{title} ..."
      started = now
      path = log_path(log)
      # Steps of one run that share a log follow each other in it.
      @logs ||= []
      File.open(path, @logs.include?(path) ? "a" : "w") do |file|
        @logs << path
        file.puts "$ #{command.join(" ")}"
        file.flush
        status = wait(spawn(env, *command, in: File::NULL, out: file, err: file, chdir: chdir, pgroup: true), limit) do
          say "  still at it after #{duration(now - started)}"
        end
        raise status ? Failure : TooLong, failure(title, path, cure, status) unless status&.success?
      end
      say "  done in #{duration(now - started)}"
    end

    # Runs one command whose output is shown, and keeps a copy in a log.
    #
    # @return [Array(Process::Status, String)] status is nil when it ran past `limit` seconds
    def tee(*command, log:, env: {}, chdir: ROOT, limit: 1200)
      reader, writer = IO.pipe
      pid = spawn(env, *command, in: File::NULL, out: writer, err: writer, chdir: chdir, pgroup: true)
      writer.close
      output = +""
      shown = Thread.current.thread_variable_get(:setup_text) || $stdout
      copier = Thread.new do
        File.open(log_path(log), "w") do |file|
          reader.each_line do |line|
            line.scrub!
            output << line
            file.write(line)
            write(line, to: shown)
          end
        end
      end
      status = wait(pid, limit) {}
      # Whoever still holds the pipe is a left-over process; the tests' own checks tell about those.
      copier.join(5)
      [status, output]
    ensure
      copier&.kill
      reader&.close
    end

    # Waits for a process group's leader, ends the whole group on Ctrl-C and past the limit.
    def wait(pid, limit)
      started = heard = now
      loop do
        return Process.last_status if Process.wait(pid, Process::WNOHANG)
        break if now - started > limit

        if now - heard > HEARTBEAT
          heard = now
          yield
        end
        sleep 0.02
      end
      say "  more than #{duration(limit)}: ending it"
      nil
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

    def log_path(name)
      FileUtils.mkdir_p(LOG_DIR)
      File.join(LOG_DIR, "#{name}.log")
    end

    def failure(title, path, cure, status)
      lines = File.foreach(path).map { |line| "    #{line.scrub.chomp}" }
      # Builds that run side by side bury the error under what the others still print.
      errors = lines.last(200).grep(/error|\*\*\*/i).first(8) - lines.last(15)
      tail = [*errors, *(errors.empty? ? [] : ["    [...]"]), *lines.last(15)].join("\n")
      ended = status ? "exit #{status.exitstatus || "by signal #{status.termsig}"}" : "took too long"
      "step failed (#{ended}): #{title}\n  from its log:\n#{tail}\n" \
        "  log: #{path.delete_prefix("#{ROOT}/")}\n  likely cure: #{cure}"
    end

    private_class_method :failure, :stop, :write
  end
end
