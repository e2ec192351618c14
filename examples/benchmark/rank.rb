# frozen_string_literal: true

# What the ranks of the comparisons have in common. The same stands in rank.py for PyTorch.

require_relative "../common/bundle"
require "json"
require "torch/distributed"

# One rank, which a comparison starts.
module Rank
  class << self
    # Reads an order of JSON from each line of standard input, has it done, and answers with a line of JSON.
    #
    # @param version [String] of what is measured: the first line of all
    # @yieldparam order [Hash]
    # @yieldreturn [Hash] the answer
    def answer_orders(version: "torch-rb #{Torch::VERSION}")
      $stdout.sync = true
      Torch::Distributed.init_process_group("gloo")
      puts JSON.generate("version" => version)
      $stdin.each_line { |line| puts JSON.generate(yield(JSON.parse(line))) }
      Torch::Distributed.destroy_process_group
    end

    # All ranks begin together.
    #
    # @yield a training step
    # @return [Array<Float>] the milliseconds of each
    def milliseconds(steps)
      Torch::Distributed.barrier
      Array.new(steps) do
        started = Process.clock_gettime(Process::CLOCK_MONOTONIC)
        yield
        1000 * (Process.clock_gettime(Process::CLOCK_MONOTONIC) - started)
      end
    end
  end
end
