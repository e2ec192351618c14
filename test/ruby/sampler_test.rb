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

  def test_wrong_arguments_are_named
    assert_match(/rank: expected 0 to 1/, assert_raises(ArgumentError) { Sampler.new(4, num_replicas: 2, rank: 2) }.message)
    assert_match(/num_replicas/, assert_raises(ArgumentError) { Sampler.new(4, num_replicas: 0, rank: 0) }.message)
    assert_match(/dataset/, assert_raises(TypeError) { Sampler.new(nil, num_replicas: 1, rank: 0) }.message)
  end
end
