# frozen_string_literal: true

# Torch::Distributed as a partner of the collectives benchmark: what measure.c is for those in C.

require "fiddle"
require "json"
require "torch/distributed"

RANK = Integer(ENV.fetch("RANK"))
RANKS = Integer(ENV.fetch("WORLD_SIZE"))
FOLDER = ENV.fetch("BENCH_FOLDER")
LIMIT = Integer(ENV.fetch("BENCH_LIMIT"))
ALARM = Fiddle::Function.new(Fiddle::Handle::DEFAULT["alarm"], [Fiddle::TYPE_INT], Fiddle::TYPE_INT)

# meeting.c in Ruby: bytes in a file that all ranks map.
class Meeting
  LINE = 64
  HEAD = 64 * 64
  MOST = 4096
  READ_WRITE = 3
  SHARED = 1

  def initialize
    map = Fiddle::Function.new(Fiddle::Handle::DEFAULT["mmap"],
      [Fiddle::TYPE_VOIDP, Fiddle::TYPE_SIZE_T, Fiddle::TYPE_INT, Fiddle::TYPE_INT, Fiddle::TYPE_INT, Fiddle::TYPE_LONG], Fiddle::TYPE_VOIDP)
    @map = File.open(File.join(FOLDER, "meeting"), "r+b") { |file| map.call(nil, file.size, READ_WRITE, SHARED, file.fileno, 0) }
    @now = 0
  end

  def come
    now = @now = (@now + 1) % 256
    following = (now + 1) % 256
    @map[RANK * LINE] = now
    RANKS.times do |other|
      spins = 0
      until (theirs = @map[other * LINE] & 255) == now || theirs == following
        Thread.pass if (spins += 1) > 200
      end
    end
  end

  # Begins a series of calls.
  def begin
    come
    @map[2] = 0 if RANK.zero?
    come
  end

  # @return [Boolean] whether call `i` was the last one: rank 0 says so one call ahead
  def ends?(i, over)
    last = @map[2] & 255
    @map[2] = (i + 1) % 255 + 1 if RANK.zero? && over && last.zero?
    last == i % 255 + 1
  end

  # How many ranks say so.
  def count(say)
    @map[RANK * LINE + 1] = say ? 1 : 0
    come
    total = Array.new(RANKS) { |other| @map[other * LINE + 1] }.sum
    come
    total
  end

  # Of each time the largest over ranks.
  def worst(mine)
    size = mine.size * 8
    @map[HEAD + RANK * MOST * 8, size] = mine.pack("d*")
    come
    columns = Array.new(RANKS) { |other| @map[HEAD + other * MOST * 8, size].unpack("d*") }
    come
    columns.transpose.map(&:max)
  end
end

# One operation on memory of its own.
class Call
  PERIOD = 13
  IN_PARTS = %w[all_gather reduce_scatter all_to_all gather scatter].freeze
  DIST = Torch::Distributed

  attr_reader :operation, :bytes, :input

  def initialize(operation, dtype, bytes, registered)
    @operation = operation
    @dtype = dtype.to_sym
    element = Torch.empty([0], dtype: @dtype).element_size
    @count = @part = [bytes / element, 1].max
    if IN_PARTS.include?(operation)
      @part = [@count / RANKS, 1].max
      @count = @part * RANKS
    end
    @bytes = @count * element
    @input, @output = Array.new(2) { (registered ? DIST.empty_shared(@count, dtype: @dtype) : Torch.empty([@count], dtype: @dtype)).zero! }
    @ins = @input.split(@part)
    @outs = @output.split(@part)
    @root = RANK.zero?
  end

  def run
    case @operation
    when "all_reduce" then DIST.all_reduce(@input)
    when "broadcast" then DIST.broadcast(@input, src: 0)
    when "reduce" then DIST.reduce(@input, dst: 0)
    when "all_gather" then DIST.all_gather_into_tensor(@output, @ins[0])
    when "reduce_scatter" then DIST.reduce_scatter_tensor(@outs[0], @input)
    when "all_to_all" then DIST.all_to_all_single(@output, @input)
    when "gather" then DIST.gather(@ins[0], @root ? @outs : nil, dst: 0)
    when "scatter" then DIST.scatter(@outs[0], @root ? @ins : nil, src: 0)
    when "barrier" then DIST.barrier
    else ping_pong
    end
  end

  # Runs once with values.
  #
  # @return [Boolean] whether the result is right
  def holds?(meeting)
    @input.copy!(values(RANK, 0, @count))
    run
    expected, got = outcome
    right = expected.nil? || Torch.equal(expected, got)
    meeting.come # others may read this rank's memory still
    @input.zero!
    @output.zero!
    meeting.come
    right
  end

  private

  def ping_pong
    if RANK.zero?
      DIST.send(@input, dst: 1)
      DIST.recv(@output, src: 1)
    elsif RANK == 1
      DIST.recv(@output, src: 0)
      DIST.send(@output, dst: 0)
    end
  end

  def outcome
    mine = RANK * @part
    case @operation
    when "all_reduce" then [values(nil, 0, @count), @input]
    when "reduce" then RANK.zero? ? [values(nil, 0, @count), @input] : nil
    when "broadcast" then [values(0, 0, @count), @input]
    when "reduce_scatter" then [values(nil, mine, @part), @outs[0]]
    when "scatter" then [values(0, mine, @part), @outs[0]]
    when "ping_pong" then (RANK < 2) ? [values(0, 0, @count), @output] : nil
    when "all_gather" then [parts(0), @output]
    when "all_to_all" then [parts(mine), @output]
    when "gather" then RANK.zero? ? [parts(0), @output] : nil
    end
  end

  def parts(first)
    Torch.cat(Array.new(RANKS) { |rank| values(rank, first, @part) })
  end

  # Of one rank, or the sum over all.
  def values(rank, first, count)
    places = Torch.arange(first, first + count, dtype: :int64).remainder(PERIOD) * 7
    (rank ? [rank] : (0...RANKS)).map { |owner| (places + owner * 3).remainder(PERIOD) }.inject(:+).to(dtype: @dtype)
  end
end

SYMMETRIC = %w[all_reduce all_gather reduce_scatter all_to_all barrier].freeze
LOOP = 32
LOOP_BYTES = 16384
LEAST = 3

# This thread to a core of its own, by rank; others of the process stay free.
def bind_to_core
  allowed = File.read("/proc/thread-self/status")[/^Cpus_allowed_list:\s*(.*)/, 1].split(",").flat_map do |part|
    first, last = part.split("-").map { |text| Integer(text) }
    (first..(last || first)).to_a
  end
  types = [Fiddle::TYPE_INT, Fiddle::TYPE_SIZE_T, Fiddle::TYPE_VOIDP]
  mask = [1 << allowed[RANK % allowed.size]].pack("Q")
  failed = Fiddle::Function.new(Fiddle::Handle::DEFAULT["sched_setaffinity"], types, Fiddle::TYPE_INT).call(0, mask.bytesize, mask)
  abort "sched_setaffinity failed" unless failed.zero?
end

def microseconds
  Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond) / 1000.0
end

def middle(values, part)
  values.sort[((values.size - 1) * part).round]
end

# Times of calls, until rank 0's time is over.
def series(meeting, most, limit)
  mine = []
  finish = microseconds + limit
  meeting.begin
  last = false
  until last || mine.size == most
    mine << yield
    last = meeting.ends?(mine.size - 1, mine.size + 1 >= LEAST && microseconds > finish)
  end
  meeting.worst(mine)
end

def timed(call, meeting, most, limit, fresh)
  worst = series(meeting, most, limit / 2) do
    call.input.zero! if fresh
    meeting.come
    started = microseconds
    call.run
    took = microseconds - started
    next took unless call.operation == "ping_pong"

    RANK.zero? ? took / 2 : 0.0
  end
  answer = {iterations: worst.size, median: middle(worst, 0.5), p10: middle(worst, 0.1), p90: middle(worst, 0.9), p99: middle(worst, 0.99),
            min: worst.min, mean: worst.sum / worst.size}
  return answer if call.bytes > LOOP_BYTES || !SYMMETRIC.include?(call.operation)

  loops = series(meeting, most, limit / 2) do
    meeting.come
    started = microseconds
    LOOP.times { call.run }
    (microseconds - started) / LOOP
  end
  answer.merge(loop: middle(loops, 0.5))
end

def measure(line, meeting)
  operation, dtype, bytes, iterations, limit, memory, input, check = line.split
  registered = memory == "registered"
  return {skip: "there is no Torch::Distributed.empty_shared"} if registered && !Torch::Distributed.respond_to?(:empty_shared)

  call = Call.new(operation, dtype, Integer(bytes), registered)
  check = check == "check"
  wrong = meeting.count(check && !call.holds?(meeting))
  call.run
  GC.start
  answer = timed(call, meeting, Integer(iterations), Float(limit), input == "fresh")
  wrong += meeting.count(check && !call.holds?(meeting))
  {bytes: (operation == "barrier") ? 0 : call.bytes, checked: check, wrong: wrong, **answer}
end

ALARM.call(LIMIT) # opening waits for ever if the driver is gone
meeting = Meeting.new
Torch::Distributed.init_process_group(ENV.fetch("BENCH_BACKEND"), init_method: "file://#{File.join(FOLDER, "store")}", rank: RANK, world_size: RANKS,
  timeout: 60)
bind_to_core unless ENV.fetch("BENCH_BIND") == "0"
answers = File.open(File.join(FOLDER, "answers"), "w") if RANK.zero?
answers&.sync = true
answers&.puts JSON.generate("version" => "torch-rb #{Torch::VERSION}, libtorch #{Torch::Distributed::LIBTORCH_VERSION}, Ruby #{RUBY_VERSION}")
File.open(File.join(FOLDER, "requests.#{RANK}")) do |requests|
  ALARM.call(0)
  requests.each_line do |line|
    ALARM.call(LIMIT)
    answer = measure(line, meeting)
    answers&.puts JSON.generate(answer)
    ALARM.call(0)
  end
end
Torch::Distributed.destroy_process_group
