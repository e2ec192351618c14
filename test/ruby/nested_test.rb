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
    assert_same other, other[1]
  end

  # As models of other gems return them.
  class Output
    attr_reader :data

    def initialize(**data)
      @data = data
    end
  end

  class Item
    attr_accessor :name, :value, :owner

    def initialize(name, value)
      @name = name
      @value = value
    end
  end

  def test_instance_variables_of_objects
    item = Item.new("item", one)
    output = Output.new(loss: one, states: [item, item], set: Set[one, 3], none: Output.new)
    assert_equal 3, Nested.tensors(output).size
    other = doubled(output)
    assert_equal [Output, 2.0, Item, "item", 2.0], [other.class, other.data[:loss].item, other.data[:states][0].class, other.data[:states][0].name,
      other.data[:states][1].value.item]
    assert_same other.data[:states][0], other.data[:states][1]
    assert_same output.data[:none], other.data[:none]
    assert_equal [[2.0], 1], [other.data[:set].grep(Torch::Tensor).map(&:item), other.data[:set].count(3)]
    assert_equal [1.0, 1.0], [output.data[:loss].item, item.value.item], "the original stays"
    refute_predicate other, :frozen?
    assert_predicate doubled(Item.new("frozen", one).freeze), :frozen?
  end

  def test_objects_that_hold_each_other
    first, second = Item.new("first", one), Item.new("second", [one])
    first.owner = {"second" => second}
    second.owner = [first, Pair.new(second, 1)]
    other = doubled(first)
    inner = other.owner["second"]
    assert_equal [2.0, 2.0], [other.value.item, inner.value[0].item]
    assert_same other, inner.owner[0]
    assert_same inner, inner.owner[1].first
    assert_same first, second.owner[0], "the original stays"
  end

  def test_any_depth
    deep = (0...20_000).inject(one) { |inner, i| i.even? ? [inner] : {inner: inner} }
    assert_equal 1, Nested.tensors(deep).size
    found = doubled(deep)
    found = found.is_a?(Hash) ? found[:inner] : found[0] until found.is_a?(Torch::Tensor)
    assert_equal 2.0, found.item
  end

  # A model that an output refers to is none of its parts.
  def test_modules_and_classes_are_left_alone
    net = Torch::NN::Linear.new(1, 1)
    output = Output.new(net: net, optimizer: Torch::Optim::SGD.new(net.parameters, lr: 1), kind: Item, value: one)
    assert_equal 1, Nested.tensors(output).size
    assert_same net, doubled(output).data[:net]
  end

  def test_what_cannot_be_looked_into
    value = one.requires_grad!
    hidden = [1, {"there" => -> { value }}]
    assert_match(/a unit: forward returned a Proc, in which no tensor can be looked for/, assert_raises(TypeError) { Nested.outputs(hidden, "a unit") }.message)
    assert_equal 1, Nested.outputs([hidden, value], "a unit").size
    assert_equal [[], [], []], [Nested.outputs(Output.new(a: 1, b: [nil, "text", Time.now, 1..2, Item]), "a unit"), Nested.outputs(nil, "a unit"),
      Torch.no_grad { Nested.outputs(hidden, "a unit") }]
  end

  def test_what_is_on_the_device_already_stays
    value = [one, {a: one}]
    assert_same value, Nested.to(value, "cpu")
  end

  def test_data_objects
    skip "Data came with Ruby 3.2" unless defined?(::Data) && ::Data.respond_to?(:define)

    point = ::Data.define(:x, :y)
    other = doubled([point.new(x: one, y: "y")]).first
    assert_equal [point, 2.0, "y"], [other.class, other.x.item, other.y]
    list = []
    list << one << point.new(x: point.new(x: list, y: one), y: 1)
    other = doubled(list)
    assert_same other, other[1].x.x
    assert_equal [2.0, 2.0], [other[0].item, other[1].x.y.item]
  end
end
