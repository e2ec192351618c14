# frozen_string_literal: true

require "minitest/autorun"
require "open3"
require "rbconfig"
require "timeout"
require "tmpdir"
require "torch/distributed"
require_relative "../held_ports"

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

  # How many times longer than usual things may take: for machines that do much else, and for slow ones.
  FACTOR = Float(ENV.fetch("TDDP_TEST_TIMEOUT_MULTIPLIER", "1"))

  # Seconds after which a world of a test, or what a test waits for, is stuck.
  LIMIT = 120 * FACTOR

  # What groups of tests are of: gloo, unless the whole run is of another.
  BACKEND = ENV.fetch("TDDP_TEST_BACKEND", "gloo")

  # What libtorch's own failures are raised as: RuntimeError by older torch-rbs.
  LIBTORCH_ERRORS = [RuntimeError, Torch::Error].freeze

  # Something that happens once, and that processes wait for which are forked after this was made.
  class Event
    def initialize
      @reader, @writer = IO.pipe
    end

    def set
      @writer.write(".")
    end

    def set?
      !@reader.wait_readable(0).nil?
    end

    def wait
      raise "waited #{LIMIT} s for an event of the test" unless @reader.wait_readable(LIMIT)
    end
  end

  # @return [Array<String>] the addresses at which somebody listens on a port, as /proc/net has them
  def listening(port)
    %w[tcp tcp6].flat_map { |name| File.readlines("/proc/net/#{name}") }.map(&:split)
      .select { |line| line[1].end_with?(format(":%04X", port)) && line[3] == "0A" }.map { |line| line[1][/\A\h+/] }
  end

  # Waits until the block is true.
  #
  # @param what [String] what is waited for
  # @return [Object] the block's value
  def await(what, limit: LIMIT)
    deadline = now + limit
    until (found = yield)
      flunk "waited #{limit} s for #{what}" if now > deadline
      sleep 0.002
    end
    found
  end

  # Waits until a thread of this process waits: it sleeps, or is in a call that lets other threads run.
  def await_waiting(thread)
    await("a thread to wait") { thread.stop? }
  end

  # Runs the block in a thread once this one waits.
  def when_waiting
    waiting = Thread.current
    Thread.new do
      await_waiting(waiting)
      yield waiting
    end
  end

  # Asserts that something took less than half of the time that it would have taken otherwise, which is one with FACTOR in it.
  def assert_sooner(elapsed, otherwise)
    assert_operator elapsed, :<, otherwise / 2.0
  end

  # Runs the block on each rank of a fresh world, within a group.
  def world(size, start_method: :fork, timeout: LIMIT / 2)
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

  # A world of three in which `victim` is killed: before the others come to the block, or `within` it, when both wait
  # there. It is none of the processes that fork_world knows, which would end the others. Rank 0 takes the store with it.
  #
  # @yieldparam rank [Integer] the caller's
  # @yieldparam others [Array<Integer>] who are left
  # @return [Array<Array>] what the block returned on each of the others, or raised, and the victim's pid
  def without(victim, within: false, timeout: LIMIT / 2)
    others = [0, 1, 2] - [victim]
    inside = others.to_h { |rank| [rank, Event.new] }
    said = Distributed.fork_world(2) do |half, port|
      join = lambda do |rank|
        place = victim.zero? ? "tcp://127.0.0.1:#{port}" : "env://"
        Distributed.init_process_group(BACKEND, init_method: place, rank: rank, world_size: 3, timeout: timeout)
        Distributed.barrier
      end
      if half.zero?
        dying = fork do
          join.call(victim)
          inside.each_value(&:wait) if within
          Process.kill(:KILL, Process.pid)
        end
      end
      join.call(others[half])
      Process.wait(dying) if dying && !within
      when_waiting { inside[others[half]].set } if within
      [value_or_failure { yield others[half], others }, dying]
    ensure
      Process.wait(dying) if dying && within
      Distributed.destroy_process_group
    end
    said.map { |value, _| [value, said[0][1]] }
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

  # The block's value, or its exception as {#failure} has it.
  def value_or_failure
    value = nil
    failure { value = yield } || value
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
    capture_ruby("-rtorch/distributed", "-e", code, *arguments, env: env)
  end

  def capture_ruby(*arguments, env: {})
    paths = $LOAD_PATH.flat_map { |path| ["-I", path] }
    Timeout.timeout(LIMIT) { Open3.capture3(env, RbConfig.ruby, *paths, *arguments) }
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
  include HeldPorts
  include Worlds
end
