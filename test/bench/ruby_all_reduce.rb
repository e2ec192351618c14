# frozen_string_literal: true

# The latency of a small all_reduce through Ruby, beside PyTorch's through Python: two processes of one thread each,
# both over Gloo. The two take turns, so that whatever else the machine does falls on both; the one whose turn it is
# not sleeps.
#
#   ruby test/bench/ruby_all_reduce.rb --turns 10 --calls 2000
#
# PYTHON names the interpreter that has torch (Debian: python3-torch and /usr/bin/python3).

require "json"
require "optparse"
require "rbconfig"
require "socket"
require "timeout"
require_relative "pytorch"

options = {turns: 10, calls: 2000, bytes: 8}
OptionParser.new do |opts|
  opts.on("--turns N", Integer, "turns of each (#{options[:turns]})")
  opts.on("--calls N", Integer, "timed calls in a turn (#{options[:calls]})")
  opts.on("--bytes N", Integer, "a multiple of 8 (#{options[:bytes]})")
  opts.on("--json", "print the figures as JSON too")
end.parse!(into: options)

# Two processes of one program, which time as many calls as they are told to.
class Pair
  LIMIT = 120

  attr_reader :title, :version, :times

  def initialize(title, command)
    @title = title
    @times = []
    port = TCPServer.open("127.0.0.1", 0) { |server| server.addr[1] }
    shared = {"OMP_NUM_THREADS" => "1", "OPENBLAS_NUM_THREADS" => "1", "MASTER_ADDR" => "127.0.0.1", "MASTER_PORT" => port.to_s,
              "WORLD_SIZE" => "2", "GLOO_SOCKET_IFNAME" => "lo"}
    @output, writer = IO.pipe
    @inputs = Array.new(2) do |rank|
      reader, input = IO.pipe
      @pids = [*@pids, Process.spawn(shared.merge("RANK" => rank.to_s), *command, in: reader, out: writer)]
      reader.close
      input
    end
    writer.close
    @version = answer.fetch("version")
  end

  def turn(calls)
    @inputs.each { |input| input.puts(calls) && input.flush }
    @times.concat(answer)
  end

  # Microseconds within which this part of the calls was done.
  def microseconds(part)
    sorted = @times.sort
    sorted[((sorted.size - 1) * part).round] / 1000.0
  end

  def close
    @inputs.each(&:close)
    @pids.each { |pid| Process.wait(pid) }
  end

  private

  def answer
    line = Timeout.timeout(LIMIT) { @output.gets } or raise "#{@title} ended: its messages are above"
    JSON.parse(line)
  end
end

python = PyTorch.python
size = options[:bytes].to_s
abort "--bytes #{size}: expected a multiple of 8, at least 8" unless options[:bytes].positive? && (options[:bytes] % 8).zero?

ours = Pair.new("torch-ddp", [RbConfig.ruby, "-I#{File.expand_path("../../lib", __dir__)}", File.join(__dir__, "ruby_all_reduce_worker.rb"), size])
theirs = Pair.new("PyTorch", [python, File.join(__dir__, "python_all_reduce.py"), size])
options[:turns].times do |turn|
  pairs = [ours, theirs]
  pairs.reverse! if turn.odd?
  pairs.each { |pair| pair.turn(options[:calls]) }
end

PARTS = {"10 %" => 0.1, "median" => 0.5, "90 %" => 0.9, "99 %" => 0.99}.freeze
puts "all_reduce of #{size} bytes, 2 processes, gloo, #{options[:turns]} turns of #{options[:calls]} calls, microseconds", "",
  format("%-12s%s", "", PARTS.keys.map { |name| format("%10s", name) }.join)
[ours, theirs].each do |pair|
  puts format("%-12s%s   %s", pair.title, PARTS.values.map { |part| format("%10.1f", pair.microseconds(part)) }.join, pair.version)
end
puts format("%-12s%s", "ratio", PARTS.values.map { |part| format("%10.2f", ours.microseconds(part) / theirs.microseconds(part)) }.join)
if options[:json]
  puts JSON.generate([ours, theirs].to_h { |pair| [pair.title, PARTS.transform_values { |part| pair.microseconds(part) }] })
end
[ours, theirs].each(&:close)
