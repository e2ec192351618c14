# frozen_string_literal: true

# Our side of lost_rank.rb: all_reduces until an error comes, and when that was. SIGUSR1 has it call another operation, and
# say when.

require "bundler/setup"
require "torch/distributed"

distributed = Torch::Distributed
say = -> { $stdout.write("#{Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond)}\n") }
other = false
Signal.trap(:USR1) { other = true }
$stdout.sync = true
distributed.init_process_group("gloo", timeout: 30)
tensor = Torch.zeros(1000)
20.times { distributed.all_reduce(tensor) }
puts "torch-rb #{Torch::VERSION}, libtorch #{distributed::LIBTORCH_VERSION}, Ruby #{RUBY_VERSION}"
begin
  loop do
    if other
      say.call
      distributed.broadcast(tensor, src: 0)
    end
    distributed.all_reduce(tensor)
  end
rescue distributed::Error
  say.call
end
sleep # until the measurement ends this process: its end is not what others are to notice
