# frozen_string_literal: true

require "json"
require "socket"
require "tempfile"

# One of the programs that compare_ddp.rb compares: its ranks are processes that wait for orders, so that the
# contestants can take turns with nothing but the training step between them.
class Contestant
  class Failed < StandardError; end

  # Ranks share a machine with as many cores as there are ranks, so each has one thread.
  THREADS = {"OMP_NUM_THREADS" => "1", "OPENBLAS_NUM_THREADS" => "1", "MKL_NUM_THREADS" => "1"}.freeze
  # What is freed is kept for the next step: the settings that libtddp gives its own process (src/base/heap.c), for the
  # programs that do not set them.
  KEPT = {"GLIBC_TUNABLES" => "glibc.malloc.mmap_threshold=2147483647:glibc.malloc.trim_threshold=18446744073709551615"}.freeze
  # What is freed goes back to the system, so that memory can be counted.
  COUNTED = {"MALLOC_MMAP_THRESHOLD_" => "65536", "MALLOC_TRIM_THRESHOLD_" => "65536", "TDDP_KEEP_MEMORY" => "0"}.freeze

  Rank = Struct.new(:pid, :orders, :answers, :errors)

  attr_reader :title, :processes, :version

  # @param title [String] what the tables call it
  # @param command [Array<String>] one rank of it
  # @param limit [Numeric] seconds that an answer may take
  # @param counted [Boolean] whether its memory is to be counted
  # @param kept [Boolean] whether malloc keeps what it frees, which torch-ddp has it do by itself
  def initialize(title, command, processes, limit:, counted: false, kept: false)
    @title = title
    @processes = processes
    @limit = limit
    port = TCPServer.open("127.0.0.1", 0) { |server| server.addr[1] }
    malloc = kept ? KEPT : {}
    malloc = COUNTED if counted
    shared = THREADS.merge(malloc, "MASTER_ADDR" => "127.0.0.1", "MASTER_PORT" => port.to_s,
      "WORLD_SIZE" => processes.to_s, "LOCAL_WORLD_SIZE" => processes.to_s, "GLOO_SOCKET_IFNAME" => "lo",
      "PYTHONDONTWRITEBYTECODE" => "1")
    @ranks = Array.new(processes) do |rank|
      start(command, shared.merge("RANK" => rank.to_s, "LOCAL_RANK" => rank.to_s))
    end
    @version = answers.first.fetch("version")
  ensure
    close unless @version
  end

  # @param order [Hash] see ddp_step.rb
  # @return [Hash] rank 0's answer
  # @raise [Failed] with what the rank said last
  def do(order)
    line = JSON.generate(order)
    @ranks.each { |rank| rank.orders.puts(line) }
    answers.first
  rescue Errno::EPIPE
    raise Failed, failure("has ended")
  end

  # Ends its processes.
  def close
    ranks, @ranks = @ranks, []
    ranks&.each { |rank| rank.orders.close }
    ranks&.each do |rank|
      finish(rank.pid)
      rank.answers.close
      rank.errors.close!
    end
  end

  private

  def start(command, environment)
    errors = Tempfile.new("contestant")
    order_reader, orders = IO.pipe
    answers, answer_writer = IO.pipe
    pid = spawn(environment, *command, in: order_reader, out: answer_writer, err: errors)
    order_reader.close
    answer_writer.close
    orders.sync = true
    Rank.new(pid, orders, answers, errors)
  end

  def answers
    deadline = now + @limit
    @ranks.map do |rank|
      left = deadline - now
      raise Failed, failure("gave no answer in #{@limit} s") unless left.positive? && rank.answers.wait_readable(left)

      line = rank.answers.gets or raise Failed, failure("has ended")
      JSON.parse(line)
    end
  end

  def failure(what)
    said = @ranks.map { |rank| File.read(rank.errors.path) }.find { |text| !text.empty? }
    "#{@title}, #{@processes} #{(@processes == 1) ? "rank" : "ranks"}, #{what}#{":\n#{ends_of(said)}" if said}"
  end

  # Ruby prints the exception first, Python last.
  def ends_of(text)
    lines = text.lines
    (lines.size > 8) ? [*lines.first(4), "...\n", *lines.last(4)].join : text
  end

  # At the end of its orders a rank ends by itself; one that hangs is ended.
  def finish(pid)
    deadline = now + 10
    until Process.wait(pid, Process::WNOHANG)
      return kill(pid) if now > deadline

      sleep 0.02
    end
  end

  def kill(pid)
    Process.kill("KILL", pid)
    Process.wait(pid)
  end

  def now
    Process.clock_gettime(Process::CLOCK_MONOTONIC)
  end
end
