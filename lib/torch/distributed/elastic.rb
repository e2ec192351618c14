# frozen_string_literal: true

require "torch_ddp/error_file"

module Torch
  module Distributed
    # A worker's dealings with its launcher, our torchrun or Python's; and torchrun from within a program.
    #
    # An exception that is not rescued is reported automatically, in the file that TORCHELASTIC_ERROR_FILE names, once
    # `torch/distributed` is loaded; under our torchrun from the script's first line on.
    module Elastic
      autoload :ChildFailedError, "torch/distributed/elastic/child_failed_error"
      autoload :LaunchConfig, "torch/distributed/elastic/launch_config"
      autoload :Launcher, "torch/distributed/elastic/launcher"
      autoload :ProcessFailure, "torch/distributed/elastic/child_failed_error"
      autoload :Timer, "torch/distributed/elastic/timer"
      private_constant :Launcher, :Timer

      FAILURES = [StandardError, ScriptError, NoMemoryError, SystemStackError].freeze
      private_constant :FAILURES

      # Reports an exception in the block to the launcher, also if the program rescues it later; PyTorch's `record`.
      #
      #   Torch::Distributed::Elastic.record { train }
      #
      #   main = Torch::Distributed::Elastic.record(method(:main))
      #   main.call(ARGV)
      #
      # @param callable [#call, nil] instead of a block
      # @return [Object, Proc] the block's value; or what calls `callable` with the arguments and the block it is given
      def self.record(callable = nil, &block)
        if callable
          raise ArgumentError, "record: expected a block or something to call, got both" if block

          return ->(*arguments, **options, &inner) { record { callable.call(*arguments, **options, &inner) } }
        end
        raise ArgumentError, "record: expected a block or something to call" unless block

        begin
          yield
        rescue *FAILURES => e
          TorchDDP::ErrorFile.write(e)
          raise
        end
      end

      # Has torchrun end this worker, and report it, unless the block is over in time: for what may hang where no timeout of its own helps,
      # as in a data loader or a driver. The worker is killed (SIGKILL); torchrun's report names the scope, and then all is as with
      # any other failure, restarts among it. Works under Python's torchrun too where it has timers (TORCHELASTIC_ENABLE_FILE_TIMER=1).
      #
      #   Torch::Distributed::Elastic.expires(after: 60, scope: "load a batch") { batch = loader.next }
      #
      # Timers with different scopes may be nested. One with a scope whose timer runs replaces it.
      #
      # @param after [Numeric] seconds
      # @param scope [String, Symbol, nil] what the report calls it; nil: the file and line of the call
      # @return [Object] the block's value
      # @raise [ArgumentError] if there is no block, or `after` is not a positive number
      # @raise [UnavailableError] if no launcher takes timers. It ignores those of processes that a worker has started
      def self.expires(after:, scope: nil)
        raise ArgumentError, "expires needs a block" unless block_given?
        unless after.is_a?(Numeric) && after.real? && after.positive?
          raise ArgumentError, "after: expected a positive number of seconds, got #{after.inspect}"
        end

        name = Timer.scope(scope || caller_locations(1, 1).first.then { |place| "#{place.path}:#{place.lineno}" })
        raise ArgumentError, "scope: expected a text, got #{scope.inspect}" if name.empty?

        Timer.start(name, after)
        begin
          yield
        ensure
          Timer.stop(name)
        end
      end

      # Runs workers under torchrun, which starts them again after failures and across nodes; PyTorch's `elastic_launch`. Returns when all
      # have ended; a failure is in torchrun's report on standard error as well.
      #
      #   config = Torch::Distributed::Elastic::LaunchConfig.new(nproc_per_node: 2, max_restarts: 1)
      #   Torch::Distributed::Elastic.launch(config, 0.1) do |rate|
      #     Torch::Distributed.init_process_group { train(rate) }
      #   end                                                                      # => {0 => ..., 1 => ...}
      #   Torch::Distributed::Elastic.launch("train.rb", config, "--rate", "0.1")  # => {0 => nil, 1 => nil}
      #
      # For a block, and for what is called in place of one, each worker runs the program again up to this call, as `fork_world` with
      # `start_method: :spawn` does, so the program must be in a file. On each node of several the program makes this call.
      #
      # @overload launch(config, *arguments)
      #   @param config [LaunchConfig]
      #   @param arguments [Array] what the block gets; each worker computes its own
      #   @yield what each worker runs, with the arguments
      # @overload launch(entry, config, *arguments)
      #   @param entry [#call, Symbol, String] a Proc or Method; the name of a method of the main program; or the path of a script, or a
      #     program that is no script
      #   @param config [LaunchConfig]
      #   @param arguments [Array] what it gets
      # @return [Hash{Integer => Object}] what each worker of this node gave, by rank: anything that Marshal can dump; nil for scripts
      # @raise [ArgumentError, TypeError] naming what is wrong
      # @raise [ChildFailedError] with what failed, once restarts are used up
      # @raise [Error] if the job failed otherwise: the nodes did not meet, or a signal ended it
      def self.launch(entry, *arguments, &block)
        config = block ? entry : arguments.shift
        raise ArgumentError, "launch: expected a block or something to call, got both" if block && !entry.is_a?(LaunchConfig)
        raise TypeError, "config: expected a LaunchConfig, got #{config.inspect}" unless config.is_a?(LaunchConfig)

        flags = config.flags
        return Launcher.new(flags, script(entry, arguments)).run(nil) if entry.is_a?(String)

        callable = block || callable(entry)
        call = Spawned.call(caller_locations(1, 1), :launch, callable)
        start = lambda do
          file, rest = Spawned.command(call)
          Launcher.new(flags, [file, *rest]).run(call)
        end
        Spawned.perform(call, start) { Spawned.take_part_under_torchrun { callable.call(*arguments) } }
      end

      class << self
        private

        def callable(entry)
          return entry if entry.is_a?(Proc) || entry.is_a?(Method)
          return entry.method(:call) if entry.respond_to?(:call)
          raise TypeError, "entry: expected a Proc, a Method, a Symbol or a String, got #{entry.inspect}" unless entry.is_a?(Symbol)

          TOPLEVEL_BINDING.receiver.method(entry)
        rescue NameError
          raise ArgumentError, "entry: the main program has no method #{entry}"
        end

        def script(entry, arguments)
          program = !entry.match?(/\.(rb|py)\z/) && (!File.file?(entry) || File.executable?(entry))
          raise ArgumentError, "entry: there is no script #{entry}" unless program || File.file?(entry)

          [*("--no-ruby" if program), entry, *arguments.map(&:to_s)]
        end
      end

      TorchDDP::ErrorFile.install
    end
  end
end
