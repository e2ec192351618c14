# frozen_string_literal: true

# Our side of ruby_all_reduce.rb: times all_reduces of so many bytes, as often as asked on stdin. RANK,
# WORLD_SIZE, MASTER_ADDR and MASTER_PORT say who takes part.

require "bundler/setup"
require "json"
require "torch/distributed"

distributed = Torch::Distributed
distributed.init_process_group("gloo")
tensor = Torch.zeros(Integer(ARGV[0]) / 8, dtype: :float64)
first = distributed.get_rank.zero?
if first
  $stdout.puts JSON.generate("version" => "torch-rb #{Torch::VERSION}, libtorch #{distributed::LIBTORCH_VERSION}, Ruby #{RUBY_VERSION}")
  $stdout.flush
end

$stdin.each_line do |line|
  calls = Integer(line)
  100.times { distributed.all_reduce(tensor) }
  times = Array.new(calls)
  GC.start
  calls.times do |i|
    started = Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond)
    distributed.all_reduce(tensor)
    times[i] = Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond) - started
  end
  next unless first

  $stdout.puts JSON.generate(times)
  $stdout.flush
end
distributed.destroy_process_group
