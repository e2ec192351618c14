# frozen_string_literal: true

require_relative "test_helper"

class DistributedSamplerTest < Minitest::Test
  Sampler = Torch::Utils::Data::DistributedSampler

  def shares(size, replicas, **options)
    Array.new(replicas) { |rank| Sampler.new(size, num_replicas: replicas, rank: rank, **options).to_a }
  end

  def test_nine_examples_on_two_processes
    assert_equal [[0, 2, 4, 6, 8], [1, 3, 5, 7, 0]], shares(9, 2, shuffle: false)
    assert_equal [[0, 2, 4, 6], [1, 3, 5, 7]], shares(9, 2, shuffle: false, drop_last: true)
  end

  def test_the_order_is_pytorchs
    sampler = Sampler.new(Array.new(10), num_replicas: 1, rank: 0, seed: 3)
    sampler.set_epoch(4)
    assert_equal [5, 0, 3, 4, 1, 7, 9, 6, 8, 2], sampler.to_a
    assert_equal [[5, 4, 9, 2], [0, 1, 6, 5], [3, 7, 8, 0]], shares(10, 3, seed: 7)
  end

  def test_fewer_examples_than_processes
    assert_equal [[0], [1], [0], [1], [0]], shares(2, 5, shuffle: false)
    assert_equal [[], [], []], shares(2, 3, shuffle: false, drop_last: true)
    assert_equal [[], []], shares(0, 2)
  end

  def test_every_example_comes_once_a_round
    [7, 8, 9, 64].product([1, 2, 3, 4]) do |size, replicas|
      all = shares(size, replicas, seed: 5)
      assert_equal 1, all.map(&:size).uniq.size
      assert_equal (0...size).to_a, all.flatten.uniq.sort
      dropped = shares(size, replicas, seed: 5, drop_last: true).flatten
      assert_equal dropped.uniq, dropped
      assert_equal size / replicas * replicas, dropped.size
    end
  end

  def test_length_epoch_and_enumeration
    sampler = Sampler.new(0...10, num_replicas: 4, rank: 3)
    assert_equal [3, 3, 12], [sampler.length, sampler.size, sampler.total_size]
    first = sampler.to_a
    assert_equal first, sampler.each.to_a
    assert_equal first, sampler.each_slice(2).to_a.flatten
    sampler.epoch = 1
    refute_equal first, sampler.to_a
  end

  def test_the_programs_random_numbers_are_left_alone
    Torch.manual_seed(1)
    expected = Torch.rand(3).to_a
    Torch.manual_seed(1)
    Sampler.new(100, num_replicas: 2, rank: 0).to_a
    assert_equal expected, Torch.rand(3).to_a
  end

  def test_rank_and_size_come_from_the_group
    alone { assert_equal [0, 1], Sampler.new(4).then { |sampler| [sampler.rank, sampler.num_replicas] } }
    assert_raises(Distributed::GroupError) { Sampler.new(4) }
  end

  def test_unpadded_every_example_comes_once
    assert_equal [[0, 2, 4, 6, 8], [1, 3, 5, 7]], shares(9, 2, shuffle: false, pad: false)
    assert_equal [[0], [1], []], shares(2, 3, shuffle: false, pad: false)
    assert_equal [[], []], shares(0, 2, pad: false)
    [7, 8, 9, 64].product([1, 2, 3, 4]) do |size, replicas|
      all = shares(size, replicas, seed: 5, pad: false)
      assert_equal (0...size).to_a, all.flatten.sort
      assert_operator all.map(&:size).minmax.reduce(:-), :>=, -1
      assert_equal all.map(&:size), Array.new(replicas) { |rank| Sampler.new(size, num_replicas: replicas, rank: rank, pad: false).size }
      assert_equal size, Sampler.new(size, num_replicas: replicas, rank: 0, pad: false).total_size
    end
    error = assert_raises(ArgumentError) { Sampler.new(4, num_replicas: 1, rank: 0, pad: false, drop_last: true) }
    assert_match(/drop_last: with pad: false/, error.message)
  end

  # What each of the first processes had handed out after `count` indices each, and what those that go on hand out.
  def broken_off(size, before, after, count, **options)
    first = Array.new(before) { |rank| Sampler.new(size, num_replicas: before, rank: rank, seed: 2, **options) }
    first.each { |sampler| sampler.set_epoch(3) }
    had = first.map { |sampler| sampler.each.take(count) }
    states = first.map(&:state_dict)
    assert_equal 1, states.uniq.size unless options[:pad] == false
    rest = Array.new(after) do |rank|
      sampler = Sampler.new(size, num_replicas: after, rank: rank, seed: 2, **options)
      sampler.load_state_dict(Marshal.load(Marshal.dump(states[0])))
      sampler.set_epoch(3)
      left = sampler.remaining
      sampler.to_a.tap { |indices| assert_equal indices.size, left }
    end
    [had, rest]
  end

  def test_an_epoch_goes_on_where_it_was
    [{}, {drop_last: true}, {shuffle: false}, {pad: false}].product([10, 11, 12]) do |options, size|
      whole = Array.new(3) { |rank| Sampler.new(size, num_replicas: 3, rank: rank, seed: 2, **options).tap { |sampler| sampler.set_epoch(3) }.to_a }
      (0..whole.map(&:size).min).each do |count|
        had, rest = broken_off(size, 3, 3, count, **options)
        assert_equal whole, had.zip(rest).map { |a, b| a + b }
      end
    end
  end

  def test_an_epoch_goes_on_with_other_processes
    [[4, 2], [2, 4], [3, 1], [1, 3]].each do |before, after|
      had, rest = broken_off(24, before, after, 3)
      assert_equal (0...24).to_a, (had + rest).flatten.uniq.sort
      assert_equal 1, rest.map(&:size).uniq.size
      had, rest = broken_off(23, before, after, 3, pad: false)
      assert_equal (0...23).to_a, (had + rest).flatten.sort
      had, rest = broken_off(23, before, after, 3, drop_last: true)
      all = (had + rest).flatten
      assert_equal all.uniq, all
      assert_operator all.size, :>, 23 - [before, after].max
    end
  end

  def test_only_the_rest_of_that_epoch_is_another
    sampler = Sampler.new(10, num_replicas: 2, rank: 1)
    sampler.set_epoch(1)
    whole = sampler.to_a
    assert_equal 10, sampler.state_dict["position"]
    sampler.load_state_dict(sampler.state_dict.merge("position" => 6))
    assert_equal [2, 5], [sampler.remaining, sampler.size]
    assert_equal whole.last(2), sampler.to_a
    assert_equal whole, sampler.to_a
    sampler.load_state_dict(sampler.state_dict.merge("position" => 6))
    sampler.set_epoch(2)
    assert_equal [5, 0], [sampler.to_a.size, Sampler.new(10, num_replicas: 2, rank: 1).state_dict["position"]]
  end

  def test_a_finished_epoch_is_finished
    [{}, {drop_last: true}, {pad: false}].each do |options|
      sampler = Sampler.new(10, num_replicas: 3, rank: 1, **options)
      whole = sampler.to_a
      state = sampler.state_dict
      other = Sampler.new(10, num_replicas: 4, rank: 0, **options)
      other.load_state_dict(state)
      again = Sampler.new(10, num_replicas: 3, rank: 1, **options)
      again.load_state_dict(state)
      assert_equal [true, true], [state["finished"], again.state_dict["finished"]]
      assert_equal [[whole] * 2, other.size], [Array.new(2) { again.to_a }, other.to_a.size]
      # An epoch that the program names once more is the finished one, another is not.
      [[0, [0, other.size]], [1, [other.size, other.size]]].each do |epoch, sizes|
        other.load_state_dict(state)
        other.set_epoch(epoch)
        assert_equal sizes, [other.remaining, other.size].tap { assert_equal sizes, [other.to_a.size, other.to_a.size] }
      end
    end
    # All was given, but the program is still in the loop.
    sampler = Sampler.new(4, num_replicas: 1, rank: 0)
    sampler.each.with_index(1) { |_, count| break if count == 4 }
    other = Sampler.new(4, num_replicas: 1, rank: 0)
    other.load_state_dict(sampler.state_dict)
    assert_equal [[], sampler.to_a], [other.to_a, other.to_a]
  end

  def test_loops_within_and_beside_the_one_that_counts
    sampler = Sampler.new(10, num_replicas: 1, rank: 0)
    at = -> { sampler.state_dict.values_at("position", "finished") }
    sampler.each.with_index(1) do |_, count|
      sampler.first(3)
      sampler.to_a
      sampler.each.next
      assert_equal [count, false], at.call
    end
    assert_equal [10, true], at.call
    # An Enumerator is left alone by a loop that ends before it, and gives way to one that goes on beyond it.
    batches = sampler.each
    3.times { batches.next }
    sampler.first(2)
    assert_equal [3, false], at.call
    sampler.first(5)
    assert_equal [5, false], at.call
    batches.next
    assert_equal [4, false], at.call
    sampler.each { break }
    sampler.set_epoch(1)
    assert_equal [0, false], at.call
    batches.next
    assert_equal [0, false], at.call
  end

  # The rule, as PyTorch has it: all indices in order, some again, and each n-th is a process's.
  def test_orders_of_many_are_the_same_rule
    [[40_000, 1], [40_001, 2], [70_000, 3], [33_000, 64], [3, 7]].each do |size, replicas|
      order = Torch.randperm(size, generator: Torch::Generator.new.tap { |generator| generator.manual_seed(5) }).to_a
      [order, (0...size).to_a].zip([true, false]) do |indices, shuffle|
        whole = (indices * (1 + replicas / size)).first(size) + indices.cycle.first((-size) % replicas)
        rank = replicas - 1
        sampler = Sampler.new(size, num_replicas: replicas, rank: rank, seed: 5, shuffle: shuffle)
        expected = (rank...whole.size).step(replicas).map { |place| whole[place] }
        assert_equal expected, sampler.to_a
        had = sampler.first(size / replicas / 2)
        sampler.load_state_dict(sampler.state_dict)
        assert_equal expected, had + sampler.to_a
      end
    end
  end

  # In times of the permutation, which PyTorch makes as well; a Ruby number for each index of all processes took 30.
  def test_an_epoch_of_a_million_begins_at_once
    cpu = lambda do |&block|
      Array.new(3) do
        start = Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID)
        block.call
        Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID) - start
      end.min
    end
    sampler = Sampler.new(1_000_000, num_replicas: 2, rank: 1)
    assert_operator cpu.call { sampler.first }, :<, 8 * cpu.call { Torch.randperm(1_000_000) }
  end

  def test_the_state_of_another_order_is_refused
    sampler = Sampler.new(10, num_replicas: 2, rank: 1)
    state = sampler.state_dict
    {"seed" => 1, "shuffle" => false, "dataset_size" => 11}.each do |key, value|
      error = assert_raises(ArgumentError) { sampler.load_state_dict(state.merge(key => value)) }
      assert_match(/#{key} is #{value}, here /, error.message)
    end
    assert_raises(ArgumentError) { sampler.load_state_dict(nil) }
    assert_match(/position, got 0 and -1/, assert_raises(ArgumentError) { sampler.load_state_dict(state.merge("position" => -1)) }.message)
  end

  def test_wrong_arguments_are_named
    assert_match(/rank: expected 0 to 1/, assert_raises(ArgumentError) { Sampler.new(4, num_replicas: 2, rank: 2) }.message)
    assert_match(/num_replicas/, assert_raises(ArgumentError) { Sampler.new(4, num_replicas: 0, rank: 0) }.message)
    assert_match(/dataset/, assert_raises(TypeError) { Sampler.new(nil, num_replicas: 1, rank: 0) }.message)
  end
end
