# frozen_string_literal: true

require "minitest/autorun"
require "open3"
require "rbconfig"
require "timeout"
require "tmpdir"
require "torch/distributed"

if ENV[Torch::Distributed::SPAWN_ENV_KEY] == "1"
  # A spawned process runs one test up to its call; what Minitest says before that is said by the parent.
  module QuietStart
    def start
      Minitest::StatisticsReporter.instance_method(:start).bind_call(self)
    end
  end
  Minitest::SummaryReporter.prepend(QuietStart)
end

# Backward must not run in the process of the tests: libtorch's autograd could not be used in forks of it then.
module Worlds
  Distributed = Torch::Distributed

  # Seconds after which a world of a test is stuck.
  LIMIT = 60

  # Runs the block on each rank of a fresh world, within a group of gloo.
  def world(size, start_method: :fork, timeout: 30)
    Timeout.timeout(LIMIT) do
      Distributed.fork_world(size, start_method: start_method) do |rank, port|
        Distributed.init_process_group("gloo", timeout: timeout)
        begin
          yield rank, port
        ensure
          Distributed.destroy_process_group
        end
      end
    end
  end

  # A world of one within this process.
  def alone
    Distributed.init_process_group("gloo", store: Distributed::HashStore.new, rank: 0, world_size: 1)
    yield
  ensure
    Distributed.destroy_process_group
  end

  # The exception that the block raises, as class name and message: for results of other processes.
  def failure
    yield
    nil
  rescue => e
    [e.class.name, e.message]
  end

  def seconds
    started = Process.clock_gettime(Process::CLOCK_MONOTONIC)
    yield
    Process.clock_gettime(Process::CLOCK_MONOTONIC) - started
  end

  # Runs a program of its own.
  # @return [Array(String, String, Process::Status)] what it wrote to its two streams, and how it ended
  def ruby(code, *arguments, env: {})
    paths = $LOAD_PATH.flat_map { |path| ["-I", path] }
    Timeout.timeout(LIMIT) { Open3.capture3(env, RbConfig.ruby, *paths, "-rtorch/distributed", "-e", code, *arguments) }
  end

  def with_env(values)
    before = values.keys.to_h { |name| [name, ENV[name]] }
    ENV.update(values)
    yield
  ensure
    ENV.update(before)
  end
end

class Minitest::Test
  include Worlds
end
