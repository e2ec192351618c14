# frozen_string_literal: true

# How long it takes until every rank that is left has an error, once a rank is killed amid all_reduces or calls another
# operation: beside PyTorch's gloo, which tells of the first only. Three processes of one host; cases take turns.
#
#   ruby test/bench/lost_rank/lost_rank.rb --rounds 10
#
# PYTHON names the interpreter that has torch (Debian: python3-torch and /usr/bin/python3).

require "bundler/setup"
require "optparse"
require "rbconfig"
require "timeout"
require "torch/distributed"
require_relative "../pytorch"

options = {rounds: 10}
OptionParser.new { |opts| opts.on("--rounds N", Integer, "rounds of each case (#{options[:rounds]})") }.parse!(into: options)

# Processes of one program, and what befalls one of them.
class Case
  RANKS = 3
  LIMIT = 60 # seconds, of which PyTorch's groups wait 30

  attr_reader :title, :milliseconds, :version

  def initialize(title, command, signal: :KILL, env: {})
    @title = title
    @command = command
    @signal = signal
    @env = {"OMP_NUM_THREADS" => "1", "OPENBLAS_NUM_THREADS" => "1", "MASTER_ADDR" => "127.0.0.1", "WORLD_SIZE" => RANKS.to_s,
            "TORCHELASTIC_USE_AGENT_STORE" => "True", "TORCHELASTIC_RESTART_COUNT" => "0", "GLOO_SOCKET_IFNAME" => "lo"}.merge(env)
    @milliseconds = []
    @pids = []
    @outputs = []
  end

  # The parent hosts the store, so whichever rank goes, that stays.
  def round(victim)
    store = Torch::Distributed::TCPStore.new("127.0.0.1", 0, nil, true)
    start(store.port)
    @version = Array.new(RANKS) { |rank| line(rank) }.first
    began = Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond)
    Process.kill(@signal, @pids[victim])
    began = Integer(line(victim)) unless @signal == :KILL
    left = (0...RANKS).reject { |rank| @signal == :KILL && rank == victim }
    @milliseconds << (left.map { |rank| Integer(line(rank)) }.max - began) / 1e6
  ensure
    finish
    store&.close
  end

  def median
    @milliseconds.sort[@milliseconds.size / 2]
  end

  private

  def start(port)
    RANKS.times do |rank|
      reader, writer = IO.pipe
      @pids << Process.spawn(@env.merge("RANK" => rank.to_s, "MASTER_PORT" => port.to_s), *@command, out: writer)
      writer.close
      @outputs << reader
    end
  end

  def line(rank)
    Timeout.timeout(LIMIT) { @outputs[rank].gets } || raise("#{@title}: rank #{rank} ended: its messages are above")
  end

  def finish
    @pids.each do |pid|
      Process.kill(:KILL, pid)
      Process.wait(pid)
    end
    @outputs.each(&:close)
    @pids.clear
    @outputs.clear
  end
end

abort "--rounds #{options[:rounds]}: expected 1 or more" unless options[:rounds].positive?
python = PyTorch.python
ours = [RbConfig.ruby, "-I#{File.expand_path("../../../lib", __dir__)}", File.join(__dir__, "worker.rb")]
cases = [
  Case.new("killed: torch-ddp, shared memory", ours),
  Case.new("killed: torch-ddp, Gloo", ours, env: {"TDDP_SHM" => "0"}),
  theirs = Case.new("killed: PyTorch, Gloo", [python, File.join(__dir__, "worker.py")]),
  Case.new("another operation: torch-ddp, shared memory", ours, signal: :USR1),
  Case.new("another operation: torch-ddp, Gloo", ours, signal: :USR1, env: {"TDDP_SHM" => "0"})
]
options[:rounds].times { |round| cases.rotate(round).each { |each| each.round(round % Case::RANKS) } }

puts "milliseconds until the last of 3 ranks has its error, #{options[:rounds]} rounds", "", "#{" " * 45}    median   longest     ratio"
cases.each do |each|
  puts format("%-45s%10.1f%10.1f%10.2f   %s", each.title, each.median, each.milliseconds.max, each.median / theirs.median, each.version)
end
