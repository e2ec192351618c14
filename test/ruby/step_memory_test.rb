# frozen_string_literal: true

require_relative "test_helper"

class StepMemoryTest < Minitest::Test
  # A heap in which each step leaves so many bytes behind until they are collected.
  class Heap
    attr_reader :most, :collected_at, :looks

    def initialize
      @garbage = 0
      @most = 0
      @looks = 0
      @steps = 1
      @collected_at = []
    end

    def collections
      @collected_at.size
    end

    def leave(bytes)
      @steps += 1
      @garbage += bytes
      @most = [@most, @garbage].max
    end

    def memory
      Torch::Distributed::StepMemory.new(in_use: -> { 1_000_000 + @garbage.tap { @looks += 1 } }, collect: -> {
        @collected_at << @steps
        @garbage = 0
      })
    end
  end

  def run_steps(bytes, steps, **options)
    heap = Heap.new
    memory = heap.memory
    memory.synchronize(options.fetch(:every), options.fetch(:budget)) unless options.empty?
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

  def test_segments_amid_a_step_are_collected_by_the_budget
    heap = Heap.new
    memory = heap.memory
    results = Array.new(40) { |index| memory.segment { heap.leave(BUDGET / 4).then { index } } }
    assert_equal [*0...40], results
    assert_operator heap.most, :<=, 1.25 * BUDGET
    assert_equal 8, heap.collections
    memory.synchronize(nil, BUDGET)
    20.times { memory.segment { heap.leave(BUDGET) } }
    assert_equal 8, heap.collections
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

  # So all ranks collect at the same steps, also if their steps do not leave quite the same.
  def test_collections_are_at_multiples_of_a_power_of_two
    [BUDGET / 5, BUDGET / 7].each { |bytes| assert_equal [1, 4, 8, 12, 16, 20], run_steps(bytes, 20).collected_at }
  end

  # Asking what is in use takes longer than collecting.
  def test_it_hardly_ever_asks_what_is_in_use
    assert_operator run_steps(BUDGET * 2, 640).looks, :<=, 2 * (640 / 64 + 7)
  end

  def test_steps_that_come_to_leave_more_are_collected_sooner
    heap = Heap.new
    memory = heap.memory
    leave = ->(bytes, steps) do
      steps.times do
        memory.step
        heap.leave(bytes)
      end
    end
    leave.call(BUDGET / 8, 500)
    leave.call(BUDGET / 2, 80)
    before = heap.collections
    leave.call(BUDGET / 2, 20)
    assert_includes 9..11, heap.collections - before
    leave.call(BUDGET / 8, 80)
    before = heap.collections
    leave.call(BUDGET / 8, 80)
    assert_includes 9..11, heap.collections - before
  end

  def test_the_longest_period_and_the_budget_can_be_set
    assert_equal [1, 12, 24, 36], run_steps(1, 40, every: 12, budget: 1000).collected_at
    assert_equal [1, 6, 12, 18], run_steps(100, 20, every: 12, budget: 700).collected_at
    assert_empty run_steps(BUDGET, 20, every: nil, budget: BUDGET).collected_at
  end

  # What programs call: at least once in so many steps, or never.
  def test_synchronize_gc
    found = Distributed.fork_world(1) do
      [{every: 5}, {every: false}, {every: true}].map do |options|
        heap = Heap.new
        Torch::Distributed::StepMemory.instance_variable_set(:@instance, heap.memory)
        Distributed.synchronize_gc(**options)
        16.times do
          Distributed.keep_memory
          heap.leave((options[:every] == true) ? BUDGET : 1)
        end
        heap.collections
      end
    end
    assert_equal [[4, 0, 16]], found
  end

  def test_periods_and_budgets_that_are_none_are_refused
    [{every: 0}, {every: 1.5}, {every: nil}, {budget: 0}, {budget: nil}].each do |options|
      text = assert_raises(ArgumentError) { Distributed.synchronize_gc(**options) }.message
      assert_match(/\A#{options.keys.first}: expected an Integer of 1 or more.*, got #{options.values.first.inspect}\z/, text)
    end
  end

  # A process of its own: in a fork of this one the heap would be as other tests have left it. The budget decides nothing here.
  def test_ruby_does_not_collect_between_steps_of_a_known_kind
    out, status = Open3.capture2e(RbConfig.ruby, "-I", File.expand_path("../../lib", __dir__), "-e", <<~RUBY)
      require "torch/distributed"
      Torch::Distributed.synchronize_gc(every: 16, budget: 1 << 40)
      counts = Array.new(128) do
        Torch::Distributed.keep_memory
        Array.new(5000) { Object.new }
        GC.count
      end
      # In the last periods, after the heap has been given room.
      p counts.last(65).each_slice(16).map(&:first).each_cons(2).map { |before, after| after - before }
    RUBY
    assert status.success?, out
    assert_equal "[1, 1, 1, 1]", out.lines.last.chomp
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

  # The system would get back at once what is as large as this.
  def test_freed_memory_stays_for_the_next_step
    kept = in_fresh_process do
      Torch::Distributed.keep_memory
      resident = -> { File.read("/proc/self/status")[/VmRSS:\s+(\d+)/, 1].to_i }
      before = resident.call
      Thread.new { Torch.ones(10_000_000) && nil }.join # of 39,000 kB, and no longer on a stack
      GC.start
      resident.call - before
    end
    assert_operator kept, :>, 30_000
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
