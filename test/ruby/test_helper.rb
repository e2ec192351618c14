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

  # What groups of tests are of: gloo, unless the whole run is of another.
  BACKEND = ENV.fetch("TDDP_TEST_BACKEND", "gloo")

  # Runs the block on each rank of a fresh world, within a group.
  def world(size, start_method: :fork, timeout: 30)
    Timeout.timeout(LIMIT) do
      Distributed.fork_world(size, start_method: start_method) do |rank, port|
        Distributed.init_process_group(BACKEND, timeout: timeout)
        begin
          yield rank, port
        ensure
          Distributed.destroy_process_group
        end
      end
    end
  end

  # A world of three in which `victim` is killed: at once, before the others come to the block, or after `pause` seconds,
  # when they are in it. It is none of the processes that fork_world knows, which would end the others.
  #
  # @yieldparam rank [Integer] the caller's
  # @yieldparam others [Array<Integer>] who are left
  # @return [Array<Array>] what the block raised on each of the others, after how many seconds, and the victim's pid
  def without(victim, pause: 0, timeout: 30)
    others = [0, 1, 2] - [victim]
    said = Distributed.fork_world(2) do |half, port|
      join = lambda do |rank|
        Distributed.init_process_group(BACKEND, init_method: "tcp://127.0.0.1:#{port}", rank: rank, world_size: 3, timeout: timeout)
        Distributed.barrier
      end
      if half.zero?
        dying = fork do
          join.call(victim)
          sleep pause
          Process.kill(:KILL, Process.pid)
        end
      end
      join.call(others[half])
      Process.wait(dying) if dying && pause.zero?
      error = nil
      elapsed = seconds { error = failure { yield others[half], others } }
      [error, elapsed, dying]
    ensure
      Process.wait(dying) if dying && pause.positive?
      Distributed.destroy_process_group
    end
    said.map { |error, elapsed, _| [error, elapsed, said[0][2]] }
  end

  # A world of one within this process.
  def alone
    Distributed.init_process_group(BACKEND, store: Distributed::HashStore.new, rank: 0, world_size: 1)
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

  # The same clock in all processes of a test.
  def now
    Process.clock_gettime(Process::CLOCK_MONOTONIC)
  end

  def seconds
    started = now
    yield
    now - started
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
