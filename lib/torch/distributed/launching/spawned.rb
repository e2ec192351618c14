# frozen_string_literal: true

require "digest"
require "tempfile"

module Torch
  module Distributed
    # Brings a program that is run again as a worker to the call of {Launching#fork_world}, {Run#run} or {Elastic.launch} that
    # started it.
    #
    # A call is known by its place in the program and the test it is in, and by how many calls from there came before: one in a loop
    # is found at the same turn of the loop, whatever the program has done to its environment by then. A program that steers its
    # new processes through the environment past earlier calls has its call found by the environment: a call with the same place
    # and variables, before which as many with these came.
    #
    # @api private
    module Spawned
      # One call: its names, by its place and by its place and the environment, each the same in every run of the program that comes
      # to it in that way; and the Minitest test it is in.
      Call = Struct.new(:id, :steered_id, :test, keyword_init: true) do
        # @return [Array<String>]
        def ids
          [steered_id, id]
        end
      end

      # What differs between a program and its new run without the program's doing, torchrun's variables among it.
      NOT_THE_PROGRAMS = /\A(TORCH_DISTRIBUTED_SPAWN|BUNDLE|RUBY|GEM_|MT_|PET_|TORCHELASTIC_|TDDP_(RUBY|GENERATION)|TORCH_NCCL_ASYNC_|
        ((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|CUDA_VISIBLE_DEVICES|(OMP|MKL|OPENBLAS)_NUM_THREADS)\z)/x

      PROGRAM = File.expand_path($PROGRAM_NAME).freeze
      private_constant :NOT_THE_PROGRAMS, :PROGRAM

      class << self
        # @return [Call]
        def call(locations, method, callable)
          test = minitest(callable)
          place = "#{File.expand_path(locations.first.absolute_path || locations.first.path)}:#{locations.first.lineno}"
          environment = ENV.to_h.reject { |name, _| name.match?(NOT_THE_PROGRAMS) }.sort
          where = [place, method, test && name_of(test)]
          Call.new(id: numbered(where), steered_id: numbered([*where, environment]), test: test)
        end

        # @return [Boolean] whether the program has a call in a file; irb and `ruby -e` have it in none
        def in_file?(locations)
          File.file?(locations.first.absolute_path || locations.first.path)
        end

        # Makes a call that starts processes, and keeps its results for those of later calls. A process that was started for this call
        # runs the block, which ends it; one that was started for a later call gets what this one gave.
        #
        # @param start [#call] starts the processes, and gives the results
        # @param reruns [Boolean] whether they run the program again
        def perform(call, start, reruns: true)
          return remember(call, &start) unless worker?

          yield if reruns && own?(call)
          earlier(call) do
            next remember(call, &start) unless reruns

            raise InvalidArgumentError, "this process was spawned by another call of fork_world, run or Elastic.launch, which its program " \
              "does not come to: run again, a program must make the same calls in the same order"
          end
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

        # The same in a process that torchrun started, whose result goes to a file in the folder that the variable of the pipe names.
        def take_part_under_torchrun(&block)
          file = File.open(File.join(ENV.delete(SPAWN_PIPE_ENV_KEY), ENV.fetch("RANK")), "wb")
          Outcome.report(file, &block)
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

        # @param pipe [Integer, String] a descriptor, or under torchrun a folder
        # @param results [Integer, String] a descriptor, or under torchrun a path
        # @return [Hash{String => String, nil}] what a worker's environment has beside this process's
        def environment(call, pipe, results)
          {
            SPAWN_ENV_KEY => "1",
            SPAWN_PIPE_ENV_KEY => pipe.to_s,
            SPAWN_CALL_ENV_KEY => call.ids.join(" "),
            SPAWN_RESULTS_ENV_KEY => results.to_s,
            "RUBYLIB" => [ENV["RUBYLIB"], *$LOAD_PATH].compact.reject { |path| path.to_s.empty? }.uniq.join(File::PATH_SEPARATOR)
          }
        end

        # @return [File] the results of earlier calls, for one worker; has no name any more
        def results_file
          file = Tempfile.create("torch-ddp")
          File.unlink(file.path)
          file.binmode
          write_results(file)
          file.rewind
          file
        end

        def write_results(file)
          file.write(Marshal.dump(remembered))
        end

        private

        def worker?
          ENV[SPAWN_ENV_KEY] == "1" && ENV.key?(SPAWN_PIPE_ENV_KEY)
        end

        # The same name for the same call in each run of the program.
        def numbered(what)
          key = Digest::SHA256.hexdigest(Marshal.dump(what))
          @calls ||= Hash.new(0)
          "#{key}:#{@calls[key] += 1}"
        end

        # Whether this process was started for the call; without the variable it takes part in the first one.
        def own?(call)
          wanted = ENV[SPAWN_CALL_ENV_KEY]
          wanted.nil? || wanted.split.intersect?(call.ids)
        end

        # What the call gave in the process that started this one; the block if it was not made there.
        def earlier(call)
          kind, value = handed_over.values_at(*call.ids).compact.first || (return yield)
          raise value if kind == :error

          value
        end

        def remember(call)
          results = yield
          keep(call, [:value, results])
          results
        rescue WorkerError => e
          keep(call, [:error, e])
          raise
        end

        def keep(call, result)
          call.ids.each { |id| remembered[id] = result }
        end

        def remembered
          @remembered ||= {}
        end

        def handed_over
          @handed_over ||= case (place = ENV[SPAWN_RESULTS_ENV_KEY])
          when nil then {}
          when /\A\d+\z/ then Marshal.load(IO.for_fd(Integer(place), "rb", &:read))
          else Marshal.load(File.binread(place))
          end
        end

        def minitest(callable)
          receiver = callable.is_a?(Proc) ? callable.binding.receiver : callable.receiver
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
