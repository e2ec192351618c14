# frozen_string_literal: true

require "fileutils"
require "minitest/autorun"
require "rbconfig"
require "securerandom"
require "socket"
require "timeout"
require "tmpdir"
require_relative "../held_ports"

# Drives the built torchrun from outside. Every process that a test starts carries a mark in its environment and gets
# a temporary folder of its own; at the test's end no process with the mark and no file in the folder may be left.
class LaunchCase < Minitest::Test
  include HeldPorts

  ROOT = File.expand_path("../..", __dir__)
  BINARY = [ENV["TDDP_TORCHRUN"], "#{ROOT}/lib/torch_ddp/native/bin/torchrun", "#{ROOT}/build/native/bin/torchrun"]
    .compact.find { |path| File.executable?(path) }

  # What the caller's bundle or launcher put there would slow workers down or change what they see.
  PLAIN = %w[RUBYOPT RUBYLIB BUNDLE_GEMFILE OMP_NUM_THREADS OPENBLAS_NUM_THREADS CUDA_VISIBLE_DEVICES
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT TDDP_RUBY TDDP_RUBY_PRELOAD].to_h { |name| [name, nil] }
    .merge(ENV.keys.grep(/\APET_/).to_h { |name| [name, nil] }).freeze

  # Seconds after which what is waited for is taken to hang: no test's outcome depends on it.
  LIMIT = 120 * Float(ENV.fetch("TDDP_TEST_TIMEOUT_MULTIPLIER", "1"))

  # What a worker's shell does until a signal ends it, without a child that lasts.
  IDLE = "while :; do sleep 0.1; done"

  # A torchrun that runs; `finish` waits for its end.
  class Run
    Result = Struct.new(:status, :out, :err, keyword_init: true) do
      # As a shell would say it.
      def code
        status.exitstatus || (128 + status.termsig)
      end
    end

    attr_reader :pid, :out, :err

    def initialize(command, env:, chdir:, stdin: File::NULL, out: nil, err: nil, **options)
      out_read, out_write = out ? [nil, out] : IO.pipe
      err_read, err_write = err ? [nil, err] : IO.pipe
      @pid = Process.spawn(env, *command, in: stdin, out: out_write, err: err_write, chdir: chdir, **options)
      out_write.close if out_read
      err_write.close if err_read
      @out = +""
      @lock = Mutex.new
      @readers = [read_all(out_read, @out), read_all(err_read, @err = +"")]
    end

    def read_all(io, into)
      return Thread.new {} unless io

      Thread.new do
        loop { io.readpartial(65_536).then { |piece| @lock.synchronize { into << piece } } }
      rescue EOFError
        io.close
      end
    end

    # Waits until standard output (or error) matches, and returns the match.
    def await(pattern, stream: :out, limit: LIMIT)
      text = (stream == :out) ? @out : @err
      LaunchCase.eventually(limit, -> { "#{pattern.inspect} in:\n#{@out}\n#{@err}" }) do
        @lock.synchronize { text.dup.force_encoding("UTF-8").scrub }[pattern]
      end
    end

    def signal(name)
      Process.kill(name, @pid)
    end

    # The pid of the process that has the workers, which is torchrun's child.
    def agent
      File.read("/proc/#{@pid}/task/#{@pid}/children").split.map(&:to_i).find do |pid|
        File.read("/proc/#{pid}/comm") == "torchrun-agent\n"
      end
    end

    # As if the machine had lost its power: torchrun gets no chance to say anything to other nodes.
    def vanish
      Process.kill(:KILL, agent)
    end

    # Waits for the end; the block is called again and again until then.
    def finish(limit: LIMIT)
      status = LaunchCase.eventually(limit, -> { "torchrun to end; so far:\n#{@out}\n#{@err}" }) do
        yield if block_given?
        Process.wait2(@pid, Process::WNOHANG)&.last
      end
      @readers.each { |reader| reader.join(LIMIT) or raise "a descriptor of torchrun's output is still open" }
      @pid = nil
      Result.new(status: status, out: @out, err: @err)
    end

    # Sends a signal until torchrun has ended: of those that follow each other at once only the first counts.
    def insist(name)
      finish { signal(name) }
    end

    def abandon
      return unless @pid

      Process.kill(:KILL, @pid)
      Process.wait(@pid)
      @pid = nil
    end
  end

  # The block's first true value within `limit` seconds.
  def self.eventually(limit, wanted)
    stop = Process.clock_gettime(Process::CLOCK_MONOTONIC) + limit
    loop do
      value = yield
      return value if value
      raise "waited #{limit} s for #{wanted.respond_to?(:call) ? wanted.call : wanted}" if Process.clock_gettime(Process::CLOCK_MONOTONIC) > stop

      sleep 0.005
    end
  end

  def eventually(wanted, limit: LIMIT, &block)
    self.class.eventually(limit, wanted, &block)
  end

  def setup
    skip "torchrun is not built: rake compile, or TDDP_TORCHRUN=/path" unless BINARY
    @mark = "torchrun-test-#{SecureRandom.hex(8)}"
    @folder = Dir.mktmpdir("launch-test")
    @temporary = File.join(@folder, "tmp")
    Dir.mkdir(@temporary)
    @runs = []
  end

  def teardown
    return unless BINARY

    @runs.each(&:abandon)
    eventually(-> { "no process of this test to be left: #{marked.map { |pid| command_line(pid) }}" }) { marked.empty? }
    assert_empty Dir.children(@temporary), "temporary files are left" unless @leaves_files
  ensure
    marked.each { |pid| Process.kill(:KILL, pid) } if @mark
    FileUtils.rm_rf(@folder) if @folder
  end

  # Processes that were started by this test and live.
  def marked
    Dir.children("/proc").grep(/\A\d+\z/).map(&:to_i).select do |pid|
      File.binread("/proc/#{pid}/environ").include?("LAUNCH_MARK=#{@mark}") && File.read("/proc/#{pid}/stat")[/\) (\S)/, 1] != "Z"
    rescue SystemCallError
      false
    end
  end

  def command_line(pid)
    File.read("/proc/#{pid}/cmdline").tr("\0", " ")
  rescue SystemCallError
    pid
  end

  def environment(extra = {})
    PLAIN.merge("LAUNCH_MARK" => @mark, "TMPDIR" => @temporary, "TDDP_RUBY" => RbConfig.ruby).merge(extra)
  end

  # Starts torchrun and goes on.
  def start(*arguments, env: {}, command: [BINARY], **options)
    Run.new([*command, *arguments.map(&:to_s)], env: environment(env), chdir: @folder, **options).tap { |run| @runs << run }
  end

  # Runs torchrun to its end.
  def run_torchrun(*arguments, limit: LIMIT, **options)
    start(*arguments, **options).finish(limit: limit)
  end

  # Workers that are a shell's script.
  def shell(code, *arguments)
    path = write_worker("sh", "#!/bin/sh\n#{code}\n")
    File.chmod(0o755, path)
    ["--no-ruby", path, *arguments]
  end

  # Workers that are a Ruby script.
  def ruby(code, *arguments)
    [write_worker("rb", code), *arguments]
  end

  # A file of its own for each: one that is written again may be read while it is empty.
  def write_worker(extension, text)
    File.join(@folder, "worker-#{SecureRandom.hex(3)}.#{extension}").tap { |path| File.write(path, text) }
  end

  def free_port
    held_port
  end

  # "R" of a process that runs, "T" of a stopped one, "Z" of one that nobody has waited for; nil if there is none.
  def state(pid)
    File.read("/proc/#{pid}/stat")[/\) (\S)/, 1]
  rescue SystemCallError
    nil
  end

  # Of these torchruns, and of all workers: not of the agents, which Ctrl-Z leaves alone.
  def states_beside_agents(*runs)
    (marked - runs.map(&:agent)).map { |pid| state(pid) }
  end

  def zombie?(pid)
    state(pid) == "Z"
  end

  def assert_code(expected, result)
    assert_equal expected, result.code, "#{result.out}\n#{result.err}"
  end
end
