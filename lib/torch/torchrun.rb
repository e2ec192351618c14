# frozen_string_literal: true

require "fcntl"
require "io/wait"
require "rbconfig"

module Torch
  # The launcher, `torchrun`, which is a program of its own. Loads no torch.
  module TorchRun
    ROOT = File.expand_path("../..", __dir__)
    private_constant :ROOT

    class << self
      # Becomes torchrun: this process does not return, and ends with torchrun's status.
      #
      # @param arguments [Array<String>] its command line
      def start(arguments)
        # Ruby notes a signal and raises later, which would be never if the program came in between; the kernel does not wait.
        # What is ignored, as under nohup, stays ignored.
        %w[INT TERM HUP QUIT].each { |name| trap(name, "IGNORE") if trap(name, "SYSTEM_DEFAULT") == "IGNORE" }
        replace_abandoned_streams
        program = ENV["TDDP_TORCHRUN"] || File.join(ROOT, "lib/torch_ddp/native/bin/torchrun")
        unless File.executable?(program)
          abort "torchrun: #{program} is not built. In a checkout run `rake compile`; an installed gem is built anew by " \
            "`gem pristine torch-ddp`."
        end

        ENV["TDDP_RUBY"] ||= RbConfig.ruby
        ENV["TDDP_RUBY_PRELOAD"] ||= File.join(ROOT, "lib/torch_ddp/torchrun_worker.rb")
        exec [program, "torchrun"], *arguments
      end

      private

      # In place of a standard stream that was closed when it started, Ruby has a pipe that nobody reads, which would end the program by
      # SIGPIPE: /dev/null is what such a stream stands for.
      def replace_abandoned_streams
        [$stdout, $stderr].each { |stream| stream.reopen(File::NULL, "w") if abandoned?(stream) }
      end

      # The end of a pipe that is written to is "readable" once the other end is closed.
      def abandoned?(stream)
        writes = (stream.fcntl(Fcntl::F_GETFL) & Fcntl::O_ACCMODE) == Fcntl::O_WRONLY
        writes && stream.stat.pipe? && !stream.wait(IO::READABLE, 0).nil?
      rescue SystemCallError, IOError
        false
      end
    end
  end
end
