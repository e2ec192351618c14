# frozen_string_literal: true

require_relative "test_helper"

class StepMemoryTest < Minitest::Test
  # A heap in which each step leaves so many bytes behind until they are collected.
  class Heap
    attr_reader :collections, :most

    def initialize
      @garbage = 0
      @most = 0
      @collections = 0
    end

    def leave(bytes)
      @garbage += bytes
      @most = [@most, @garbage].max
    end

    def memory
      Torch::Distributed::StepMemory.new(in_use: -> { 1_000_000 + @garbage }, collect: -> {
        @collections += 1
        @garbage = 0
      })
    end
  end

  def run_steps(bytes, steps)
    heap = Heap.new
    memory = heap.memory
    steps.times do
      memory.step
      heap.leave(bytes)
    end
    heap
  end

  BUDGET = Torch::Distributed::StepMemory::BUDGET

  def test_a_step_that_leaves_more_than_the_budget_is_collected_at_once
    heap = run_steps(BUDGET * 2, 50)
    assert_equal 50, heap.collections
    assert_equal BUDGET * 2, heap.most
  end

  def test_small_steps_come_together_until_the_budget_is_full
    heap = run_steps(BUDGET / 8, 80)
    assert_operator heap.most, :<=, BUDGET
    assert_includes 10..12, heap.collections
  end

  def test_steps_that_leave_nothing_are_left_to_ruby
    assert_equal 1, run_steps(0, 1).collections
    assert_operator run_steps(100, 2500).collections, :<=, 3
  end

  def test_where_nothing_can_be_told_of_the_heap_it_hardly_collects
    collections = 0
    memory = Distributed::StepMemory.new(in_use: -> {}, collect: -> { collections += 1 })
    1500.times { memory.step }
    assert_equal 2, collections
  end

  def test_the_heap_in_use_grows_with_a_tensor_and_shrinks_when_it_is_collected
    in_use = -> { Distributed.send(:_heap_in_use) }
    skip "this C library does not tell what is in use" unless in_use.call
    before = in_use.call
    tensor = Torch.zeros(16 * 1024 * 1024)
    assert_operator in_use.call - before, :>=, 4 * tensor.numel
  end

  # What a program without DistributedDataParallel calls in each step.
  def test_a_process_alone_keeps_memory_as_a_rank_does
    kept, peak = in_fresh_process do
      layer = Torch::NN::Linear.new(256, 256)
      input = Torch.randn(2048, 256)
      highest = -> { File.read("/proc/self/status")[/VmHWM:\s+(\d+)/, 1].to_i / 1024 }
      step = lambda do
        kept = Torch::Distributed.keep_memory
        Torch.tanh(Torch.tanh(layer.call(input))).sum.backward
        kept
      end
      4.times { step.call }
      before = highest.call
      [Array.new(60) { step.call }.uniq, highest.call - before]
    end
    assert_equal [true], kept
    assert_operator peak, :<=, 100
  end

  def test_a_process_that_is_not_to_keep_memory_says_so
    assert_equal [false, false], in_fresh_process("TDDP_KEEP_MEMORY" => "0") { Array.new(2) { Torch::Distributed.keep_memory } }
  end

  # A process in which nobody has asked for it yet.
  def in_fresh_process(environment = {})
    world(1) do
      ENV.update(environment)
      Torch::Distributed::StepMemory.instance_variable_set(:@instance, nil)
      yield
    end.first
  end

  # Activations of some 8 MB a step: without collecting in time hundreds of MB come together.
  def test_training_keeps_to_little_memory
    peaks = world(1) do
      model = Torch::NN::Parallel::DistributedDataParallel.new(Torch::NN::Linear.new(256, 256))
      input = Torch.randn(2048, 256)
      highest = -> { File.read("/proc/self/status")[/VmHWM:\s+(\d+)/, 1].to_i / 1024 }
      4.times { Torch.tanh(Torch.tanh(model.call(input))).sum.backward }
      before = highest.call
      60.times { Torch.tanh(Torch.tanh(model.call(input))).sum.backward }
      highest.call - before
    end
    assert_operator peaks.first, :<=, 100
  end
end
