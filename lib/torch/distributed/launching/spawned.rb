# frozen_string_literal: true

require "digest"
require "tempfile"

module Torch
  module Distributed
    # Brings a program that is run again as a worker to the call of {Launching#fork_world} that started it.
    #
    # A call is known by its place in the program, the test it is in and the environment, and by how many calls
    # with all of these equal came before. A program that steers its new processes through the environment
    # therefore has its call found at once, and one that calls from a loop at the same turn of the loop.
    #
    # @api private
    module Spawned
      # One call: its name, the same in every run of the program, and the Minitest test it is in.
      Call = Struct.new(:id, :test, keyword_init: true)

      # What differs between a program and its new run without the program's doing.
      NOT_THE_PROGRAMS = /\A(TORCH_DISTRIBUTED_SPAWN|BUNDLE|RUBY|GEM_|MT_|OMP_NUM_THREADS\z)/

      PROGRAM = File.expand_path($PROGRAM_NAME).freeze
      private_constant :NOT_THE_PROGRAMS, :PROGRAM

      class << self
        # @return [Call]
        def call(locations, method, block)
          test = minitest(block)
          place = "#{File.expand_path(locations.first.absolute_path || locations.first.path)}:#{locations.first.lineno}"
          environment = ENV.to_h.reject { |name, _| name.match?(NOT_THE_PROGRAMS) }.sort
          key = Digest::SHA256.hexdigest(Marshal.dump([place, method, test && name_of(test), environment]))
          @calls ||= Hash.new(0)
          Call.new(id: "#{key}:#{@calls[key] += 1}", test: test)
        end

        # @return [Boolean] whether the program has a call in a file; irb and `ruby -e` have it in none
        def in_file?(locations)
          File.file?(locations.first.absolute_path || locations.first.path)
        end

        # @return [Boolean] whether this process was spawned and has not come to its call yet
        def worker?
          ENV[SPAWN_ENV_KEY] == "1" && ENV.key?(SPAWN_PIPE_ENV_KEY)
        end

        # @return [Boolean] whether it has come to it now
        def target?(call)
          [nil, call.id].include?(ENV[SPAWN_CALL_ENV_KEY])
        end

        # Runs the block as the rank this process was made for, and ends.
        def take_part
          pipe = IO.for_fd(Integer(ENV.delete(SPAWN_PIPE_ENV_KEY)), "wb")
          pipe.close_on_exec = true
          rank = Integer(ENV.fetch(SPAWN_RANK_ENV_KEY))
          port = Integer(ENV.fetch(SPAWN_PORT_ENV_KEY))
          store_port = ENV[SPAWN_STORE_PORT_ENV_KEY]&.then { |text| Integer(text) }
          Outcome.report(pipe) { yield rank, port, store_port }
        end

        # What the call gave in the process that started this one; the block if it was not made there.
        def earlier(call)
          kind, value = handed_over.fetch(call.id) { return yield }
          raise value if kind == :error

          value
        end

        # Keeps a call's results for processes that later calls spawn.
        def remember(call)
          results = yield
          remembered[call.id] = [:value, results]
          results
        rescue WorkerError => e
          remembered[call.id] = [:error, e]
          raise
        end

        # @return [Array(String, Array<String>)] the file to run and its arguments
        def command(call)
          script = ENV[SPAWN_SCRIPT_ENV_KEY] || (call.test && file_of(call.test)) || PROGRAM
          unless File.file?(script)
            raise InvalidArgumentError, "spawned processes run the program again, but #{$PROGRAM_NAME} is no file: put " \
              "the program into one, or start it with torchrun; on the CPU, fork_world with start_method: :fork and run with device: \"cpu\" " \
              "need no file"
          end

          filter = ENV[SPAWN_TEST_ENV_KEY] || (call.test && "/\\A#{Regexp.escape(name_of(call.test))}\\z/")
          [script, filter ? ["-n", filter] : SPAWN_ARGV]
        end

        # @return [Hash{String => String, nil}] what a worker's environment has beside this process's
        def environment(call, rank, world_size, port, store_port, pipe, results)
          {
            SPAWN_ENV_KEY => "1",
            SPAWN_RANK_ENV_KEY => rank.to_s,
            SPAWN_WORLD_SIZE_ENV_KEY => world_size.to_s,
            SPAWN_PORT_ENV_KEY => port.to_s,
            SPAWN_STORE_PORT_ENV_KEY => store_port.to_s,
            SPAWN_PIPE_ENV_KEY => pipe.fileno.to_s,
            SPAWN_CALL_ENV_KEY => call.id,
            SPAWN_RESULTS_ENV_KEY => results.fileno.to_s,
            "RUBYLIB" => [ENV["RUBYLIB"], *$LOAD_PATH].compact.reject { |path| path.to_s.empty? }.uniq.join(File::PATH_SEPARATOR)
          }
        end

        # @return [File] the results of earlier calls, for one worker; has no name any more
        def results_file
          file = Tempfile.create("torch-ddp")
          File.unlink(file.path)
          file.binmode
          file.write(Marshal.dump(remembered))
          file.rewind
          file
        end

        private

        def remembered
          @remembered ||= {}
        end

        def handed_over
          @handed_over ||= if ENV.key?(SPAWN_RESULTS_ENV_KEY)
            Marshal.load(IO.for_fd(Integer(ENV[SPAWN_RESULTS_ENV_KEY]), "rb", &:read))
          else
            {}
          end
        end

        def minitest(block)
          receiver = block.binding.receiver
          receiver if defined?(Minitest::Test) && receiver.is_a?(Minitest::Test)
        end

        def name_of(test)
          "#{test.class}##{test.name}"
        end

        def file_of(test)
          (Object.const_source_location(test.class.name) || test.method(test.name).source_location).first
        rescue NameError
          test.method(test.name).source_location.first
        end
      end
    end
  end
end
