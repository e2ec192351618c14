# frozen_string_literal: true

require_relative "test_helper"

class ObjectsTest < Minitest::Test
  # Sizes differ from rank to rank.
  def self.object(rank)
    {"rank" => rank, "list" => [nil, 1.5, "é" * rank], "deep" => {"n" => 2**70}}
  end

  # Reads and writes what it likes.
  module Reversing
    def self.dump(object) = object.to_s.reverse

    def self.load(bytes) = bytes.reverse
  end

  (1..4).each do |size|
    define_method(:"test_objects_on_#{size}") do
      results = world(size) do |rank|
        mine = ObjectsTest.object(rank)
        list = Array.new(size)
        named = [Distributed.all_gather_object(mine, object_list: []), Distributed.all_gather_object(nil, object_list: nil)]
        filled = Distributed.all_gather_object(list, mine).equal?(list) && Distributed.all_gather_object(mine, object_list: list).equal?(list)
        gathered = (0...size).map { |root| Distributed.gather_object(mine, dst: root) }
        shared = [mine, rank, nil]
        Distributed.broadcast_object_list(shared, src: size - 1)
        part = [nil]
        returned = Distributed.scatter_object_list(part, (Array.new(size) { |to| [to, "x" * to] } if rank.zero?))
        {filled: filled, list: list, named: named, fresh: Distributed.all_gather_object(rank), gathered: gathered, shared: shared, part: part + [returned]}
      end
      objects = Array.new(size) { |rank| ObjectsTest.object(rank) }
      results.each_with_index do |said, rank|
        roots = Array.new(size) { |root| objects if root == rank }
        assert_equal({filled: true, list: objects, named: [objects, [nil] * size], fresh: (0...size).to_a, gathered: roots, shared: [objects.last, size - 1, nil],
                      part: [[rank, "x" * rank]] * 2}, said)
      end
    end
  end

  def test_serializers
    results = world(2) do |rank|
      json = Distributed.all_gather_object({rank: rank, name: "é"}, serializer: :json)
      own = Distributed.all_gather_object("a#{rank}", serializer: Reversing)
      empty = Distributed.all_gather_object("", serializer: Reversing)
      list = [rank.zero? ? "first" : nil, rank.zero? ? "2" : nil]
      Distributed.broadcast_object_list(list, serializer: "json")
      [json, own, empty, list, json.first["name"].encoding.to_s]
    end
    results.each do |said|
      assert_equal [[{"rank" => 0, "name" => "é"}, {"rank" => 1, "name" => "é"}], %w[a0 a1], ["", ""], %w[first 2], "UTF-8"], said
    end
  end

  def test_in_a_group_of_some_ranks
    results = world(3) do |rank|
      group = Distributed.new_group([1, 2])
      next if rank.zero?

      list = [rank]
      Distributed.broadcast_object_list(list, src: 2, group: group)
      [Distributed.all_gather_object(rank, group: group), Distributed.gather_object(:"r#{rank}", group: group, group_dst: 0), list,
        Distributed.scatter_object_list(nil, (%w[a b] if rank == 2), src: 2, group: group)]
    end
    assert_equal [nil, [[1, 2], %i[r1 r2], [2], "a"], [[1, 2], nil, [2], "b"]], results
  end

  def test_messages_of_objects
    results = world(3) do |rank|
      case rank
      when 0
        first = [nil, nil]
        source = Distributed.recv_object_list(first, src: 2)
        second = [nil]
        [source, first, Distributed.recv_object_list(second, serializer: :json), second]
      when 1
        Distributed.send_object_list([{"a" => [1]}], dst: 0, serializer: :json)
      else
        Distributed.send_object_list([ObjectsTest.object(2), :two], dst: 0)
      end.tap { Distributed.barrier } # the first message between hosts connects all ranks, so none may have left
    end
    assert_equal [[2, [ObjectsTest.object(2), :two], 1, [{"a" => [1]}]], nil, nil], results
  end

  def test_wrong_arguments_are_named
    alone do
      {
        /serializer: expected :marshal, :json or an object with dump and load, got :yaml/ => -> { Distributed.all_gather_object(1, serializer: :yaml) },
        /serializer: expected .* to dump a String, got Integer/ =>
          -> { Distributed.all_gather_object(1, serializer: Struct.new(:dump, :load).new(1, 2).tap { |each| def each.dump(_) = 1 }) },
        /object_list: expected nil or an Array to fill, empty or of 1 elements, got \[1, 2\]/ => -> { Distributed.all_gather_object([1, 2], 3) },
        /object_gather_list: expected .*, got :all/ => -> { Distributed.gather_object(3, :all) },
        /object_list: expected an Array of one or more objects that can be changed, got \[\]/ => -> { Distributed.broadcast_object_list([]) },
        /object_list: expected .* got \[1\]/ => -> { Distributed.broadcast_object_list([1].freeze) },
        /scatter_object_input_list: expected an Array of 1 objects.* got NilClass/ => -> { Distributed.scatter_object_list([nil]) },
        /scatter_object_output_list: expected .* got \[\]/ => -> { Distributed.scatter_object_list([], [1]) },
        /src: expected a rank from 0 to 0, got 4/ => -> { Distributed.broadcast_object_list([1], src: 4) },
        /all_gather_object: expected to be called outside of coalescing_manager/ =>
          -> { Distributed.coalescing_manager { Distributed.all_gather_object(1) } },
        /no _dump_data is defined for class Proc/ => -> { Distributed.all_gather_object(-> {}) }
      }.each do |text, call|
        assert_match text, failure(&call)&.last.to_s
      end
    end
  end
end
