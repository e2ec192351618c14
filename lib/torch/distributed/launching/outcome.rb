# frozen_string_literal: true

module Torch
  module Distributed
    # What a worker process reports to its parent: one Marshal dump in a pipe, and its exit status; an exception to torchrun too.
    #
    # @api private
    module Outcome
      LAUNCHER = File.expand_path("../fork_world.rb", __dir__).freeze
      private_constant :LAUNCHER

      class << self
        # Runs the block in a process that does nothing else any more; never returns.
        #
        # @param pipe [IO] the parent's
        def report(pipe)
          pipe.binmode
          status = attempt(pipe) { yield }
          $stdout.flush
          $stderr.flush
        rescue Exception # standard:disable Lint/RescueException
          status = 1
        ensure
          # Not exit: the exit handlers that were inherited are the parent's.
          Process.exit!(status || 1)
        end

        private

        def attempt(pipe)
          dump = dump_value(yield)
          write(pipe, dump)
          0
        rescue SystemExit => e
          e.success? ? write(pipe, Marshal.dump(nil)) : write(pipe, failure(e, "the block called exit(#{e.status})"))
          e.status
        rescue Exception => e # standard:disable Lint/RescueException
          TorchDDP::ErrorFile.write(e)
          Distributed.send(:leave_at, e) # for the other ranks, before the parent ends them
          write(pipe, failure(e, "#{e.class}: #{e.message}"))
          1
        end

        def dump_value(value)
          Marshal.dump(value)
        rescue TypeError => e
          raise TypeError, "the block's value cannot be sent to the parent (#{e.message}): " \
            "return numbers, strings, arrays or hashes; of a tensor, its to_a"
        end

        def failure(error, text)
          Marshal.dump({error: text, class: error.class.name, backtrace: own_part(error.backtrace || [])})
        end

        # What lies behind the call of fork_world is the parent's, and its exception shows it.
        def own_part(backtrace)
          own = backtrace.take_while { |line| !line.start_with?("#{LAUNCHER}:") }
          own.empty? ? backtrace : own
        end

        def write(pipe, dump)
          pipe.write(dump)
          pipe.close
        rescue Errno::EPIPE
          # The parent has ended: there is no reader.
        end
      end
    end
  end
end
