# frozen_string_literal: true

require_relative "test_helper"

class NestedTest < Minitest::Test
  Nested = Torch::Distributed::Nested
  Pair = Struct.new(:first, :second)
  Named = Struct.new(:value, keyword_init: true)

  def doubled(value)
    Nested.map(value) { |tensor| tensor * 2 }
  end

  def one
    Torch.tensor([1.0])
  end

  def test_tensors_are_found_at_any_depth_in_order
    tensors = Array.new(5) { |index| Torch.tensor(index) }
    value = [tensors[0], {:a => tensors[1], "b" => Pair.new(tensors[2], [[tensors[3]], 7])}, Named.new(value: tensors[4]), nil, "text"]
    assert_equal tensors.map(&:object_id), Nested.tensors(value).map(&:object_id)
    assert_equal [], Nested.tensors({a: 1})
    assert_equal [tensors[0].object_id], Nested.tensors(tensors[0]).map(&:object_id)
  end

  def test_structure_stays
    value = [one, {:a => one, "b" => Pair.new(one, [[one], 7])}, Named.new(value: one), nil, "text"]
    other = doubled(value)
    assert_equal [2.0] * 5, Nested.tensors(other).map(&:item)
    assert_equal [1.0] * 5, Nested.tensors(value).map(&:item), "the original stays"
    assert_equal [[:a, "b"], Pair, Named, 7, nil, "text"],
      [other[1].keys, other[1]["b"].class, other[2].class, other[1]["b"].second[1], other[3], other[4]]
  end

  def test_what_does_not_change_stays_the_same_object
    inner = [1, {b: "text"}]
    value = {inner: inner, tensor: one}
    other = doubled(value)
    refute_same value, other
    assert_same inner, other[:inner]
    assert_same inner, doubled(inner)
    assert_same value, Nested.map(value) { |tensor| tensor }
  end

  def test_kinds_of_containers_stay
    kind = Class.new(Array)
    hash = Hash.new(:default).compare_by_identity
    key = +"key"
    hash[key] = one
    assert_instance_of kind, doubled(kind.new([one]))
    other = doubled(hash)
    assert_equal [true, :default, 2.0], [other.compare_by_identity?, other[:none], other[key].item]
    assert_predicate doubled([one].freeze), :frozen?
    refute_predicate doubled([one]), :frozen?
  end

  def test_one_object_stays_one_and_one_that_holds_itself_ends
    shared = [one]
    first, second = doubled([shared, shared])
    assert_same first, second
    round = [one]
    round << round
    other = doubled(round)
    assert_equal 2.0, other[0].item
    assert_same round, other[1]
  end

  def test_data_objects
    skip "Data came with Ruby 3.2" unless defined?(::Data) && ::Data.respond_to?(:define)

    point = ::Data.define(:x, :y)
    other = doubled([point.new(x: one, y: "y")]).first
    assert_equal [point, 2.0, "y"], [other.class, other.x.item, other.y]
  end
end
