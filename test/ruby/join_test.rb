# frozen_string_literal: true

require_relative "test_helper"

class JoinTest < Minitest::Test
  Join = Torch::Distributed::Algorithms::Join

  # Sums what is counted by all processes; those that have nothing left add zero.
  class Counter
    include Torch::Distributed::Algorithms::Joinable

    Hook = Class.new(Torch::Distributed::Algorithms::JoinHook) do
      def initialize(counter, step)
        super()
        @counter = counter
        @step = step
      end

      def main_hook
        @counter.add(0)
      end

      def post_hook(is_last_joiner)
        @counter.ended << [is_last_joiner, @step]
      end
    end

    attr_reader :sums, :active, :ended

    def initialize(group = Torch::Distributed.default_process_group)
      @group = group
      @sums = []
      @active = []
      @ended = []
    end

    def join_hook(step: nil, **)
      Hook.new(self, step)
    end

    def join_process_group
      @group
    end

    def count(value)
      @active << Join.notify_join_context(self)
      add(value)
    end

    def add(value)
      @sums << Torch::Distributed.all_reduce(Torch.tensor([value]), group: @group).item
    end
  end

  def test_those_who_are_through_go_on_for_the_others
    results = world(3) do |rank|
      counter = Counter.new
      value = Join.run([counter], step: 7) { (rank + 1).times { counter.count(1) } && :value }
      [value, counter.sums, counter.active, counter.ended, counter.joining?]
    end
    sums = [3, 2, 1]
    assert_equal [:value, sums, [3], [[false, 7]], false], results[0]
    assert_equal [:value, sums, [3, 2], [[false, 7]], false], results[1]
    assert_equal [:value, sums, [3, 2, 1], [[true, 7]], false], results[2]
  end

  def test_several_at_once_and_no_inputs_at_all
    results = world(2) do |rank|
      first = Counter.new
      second = Counter.new
      Join.new([first, second]).run do
        (rank * 2).times do
          first.count(1)
          second.count(10)
        end
      end
      [first.sums, second.sums, first.active, second.active, first.ended]
    end
    assert_equal [[1, 1], [10, 10], [], [], [[false, nil]]], results[0]
    assert_equal [[1, 1], [10, 10], [1, 1], [nil, nil], [[true, nil]]], results[1]
  end

  def test_it_may_be_repeated_and_left_early
    results = world(2) do |rank|
      counter = Counter.new
      leave = -> { Join.run([counter]) { return counter.count(1) } }
      leave.call
      Join.run([counter]) { rank.times { counter.count(2) } }
      Join.run([counter], enable: false) { counter.count(3) }
      [counter.sums, counter.active]
    end
    assert_equal [[[2, 2, 6], [2, nil]], [[2, 2, 6], [2, 1, nil]]], results
  end

  def test_throw_on_early_termination
    results = world(3) do |rank|
      counter = Counter.new
      said = failure { Join.run([counter], throw_on_early_termination: true) { ((rank == 1) ? 1 : 3).times { counter.count(1) } } }
      after = Distributed.all_reduce(Torch.tensor([1])).item
      [said, counter.sums, after, counter.joining?]
    end
    results.each_with_index do |(said, *rest), rank|
      assert_equal "Torch::Distributed::Error", said[0]
      assert_match(/1 of 3 processes have no more inputs#{", rank 1 among them" if rank == 1}\z/, said[1])
      assert_equal [[3], 3, false], rest
    end
    even = world(2) do
      counter = Counter.new
      Join.run([counter], throw_on_early_termination: true) { 2.times { counter.count(1) } }
      counter.sums
    end
    assert_equal [[2, 2]] * 2, even
  end

  def test_an_exception_ends_it_at_once
    results = world(2) do
      counter = Counter.new
      said = failure { Join.run([counter]) { raise IOError, "broken" } }
      [said, counter.ended, counter.joining?]
    end
    assert_equal [[%w[IOError broken], [], false]] * 2, results
  end

  def test_wrong_arguments
    said = world(2) do
      other = Distributed.new_group([0, 1])
      [
        failure { Join.new([]) },
        failure { Join.new([nil]) },
        failure { Join.new([Counter.new, Counter.new(other)]) }
      ]
    end.first
    assert_equal %w[ArgumentError ArgumentError ArgumentError], said.map { |name, _| name }
    assert_match(/one process group/, said[2][1])
    bare = Class.new { include Torch::Distributed::Algorithms::Joinable }.new
    assert_match(/join_hook: expected/, assert_raises(NotImplementedError) { bare.join_hook }.message)
    assert_match(/join_process_group: expected/, assert_raises(NotImplementedError) { Join.new([bare]) }.message)
  end
end
