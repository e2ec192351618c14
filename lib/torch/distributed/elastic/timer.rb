# frozen_string_literal: true

require "json"

module Torch
  module Distributed
    module Elastic
      # Requests for timers to torchrun, ours or Python's: lines of JSON in a named pipe, in the format of PyTorch's FileTimerClient.
      #
      # @api private
      module Timer
        VARIABLE = "TORCHELASTIC_TIMER_FILE"

        # Longer ones would not be written at once, and could mix with those of other processes.
        MOST_BYTES = 4096
        MOST_SCOPE = 255
        # Forever.
        LONGEST = 1e9
        private_constant :VARIABLE, :MOST_BYTES, :MOST_SCOPE, :LONGEST

        class << self
          # Starts a timer; one of the same scope takes its place.
          def start(scope, after)
            request(scope, Process.clock_gettime(Process::CLOCK_REALTIME) + [after, LONGEST].min, Signal.list.fetch("KILL"))
          end

          # Nobody waits for a timer of a launcher that has ended.
          def stop(scope)
            request(scope, -1.0, 0)
          rescue UnavailableError
            nil
          end

          # @return [String] what is left of a name that is too long
          def scope(name)
            name.to_s.encode(Encoding::UTF_8, invalid: :replace, undef: :replace).scrub.byteslice(0, MOST_SCOPE).scrub("")
          end

          private

          def request(scope, time, signal)
            line = "#{JSON.generate(version: 1, pid: Process.pid, scope_id: scope, expiration_time: time, signal: signal)}\n"
            raise ArgumentError, "scope: #{scope.inspect} is too long" if line.bytesize > MOST_BYTES

            # Not to wait for a reader. Python's torchrun reads on only once nobody has it open.
            File.open(path, File::WRONLY | File::NONBLOCK) { |pipe| pipe.write(line) }
          rescue SystemCallError => e
            raise UnavailableError, "torchrun takes no timers: #{e.message}"
          end

          def path
            found = ENV[VARIABLE]
            return found unless found.nil? || found.empty?

            raise UnavailableError, "#{VARIABLE} is not set: timers need a launcher that has them, such as torchrun"
          end
        end
      end
    end
  end
end
