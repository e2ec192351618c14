# frozen_string_literal: true

require_relative "test_helper"

class DebugTest < Minitest::Test
  def teardown
    Distributed.set_debug_level(:off)
  end

  def test_levels
    assert_equal :off, Distributed.get_debug_level
    assert_equal %i[info detail off], [:info, "DETAIL", :OFF].map { |level| Distributed.set_debug_level(level) }
    {nil => :off, "" => :off, "INFO" => :info, "detail" => :detail, "OFF" => :off}.each do |value, level|
      with_env("TORCH_DISTRIBUTED_DEBUG" => value) { assert_equal level, Distributed.set_debug_level_from_env }
      assert_equal level, Distributed.get_debug_level
    end
    with_env("TORCH_DISTRIBUTED_DEBUG" => "YES") do
      name, text = failure { Distributed.set_debug_level_from_env }
      assert_equal ["ArgumentError", "TORCH_DISTRIBUTED_DEBUG: expected OFF, INFO or DETAIL, got \"YES\""], [name, text]
    end
    assert_match(/level: expected OFF, INFO or DETAIL, got 3/, failure { Distributed.set_debug_level(3) }.last)
  end

  def test_the_variable_is_read_at_the_start
    out, = ruby("print Torch::Distributed.get_debug_level", env: {"TORCH_DISTRIBUTED_DEBUG" => "INFO"})
    assert_equal "info", out
  end

  SHAPES = [[2, 3], [3, 2]].freeze

  # Each differs in its shapes alone: as many elements on both ranks.
  CALLS = {
    all_reduce: ->(rank) { Distributed.all_reduce(Torch.zeros(SHAPES[rank])) },
    reduce: ->(rank) { Distributed.reduce(Torch.zeros(SHAPES[rank]), dst: 0) },
    broadcast: ->(rank) { Distributed.broadcast(Torch.zeros(SHAPES[rank]), src: 1) },
    all_gather: ->(rank) { Distributed.all_gather(Array.new(2) { Torch.zeros(SHAPES[rank]) }, Torch.zeros(SHAPES[rank])) },
    all_gather_into_tensor: ->(rank) { Distributed.all_gather_into_tensor(Torch.zeros(12), Torch.zeros(SHAPES[rank])) },
    reduce_scatter_tensor: ->(rank) { Distributed.reduce_scatter_tensor(Torch.zeros(SHAPES[rank]), Torch.zeros(12)) },
    all_reduce_coalesced: ->(rank) { Distributed.all_reduce_coalesced(Array.new(20) { |i| Torch.zeros((i == 19) ? SHAPES[rank] : [1]) }) }
  }.freeze

  def test_with_detail_shapes_are_compared
    CALLS.each do |name, call|
      said = world(2) do |rank|
        Distributed.set_debug_level(:detail)
        failure { call.call(rank) }
      end
      said.each do |error, text|
        assert_equal "Torch::Distributed::MismatchError", error, name
        next assert_match(/20 tensors \(digest \h{16}\)/, text) if name == :all_reduce_coalesced

        assert_match(/float32 \[2, 3\]/, text, name)
        assert_match(/float32 \[3, 2\]/, text, name)
      end
    end
  end

  def test_with_detail_what_agrees_goes_on
    results = world(2) do |rank|
      Distributed.set_debug_level("DETAIL")
      scalar = Distributed.all_reduce(Torch.tensor(rank + 1.0))
      Distributed.barrier
      got = Torch.zeros(rank + 1)
      Distributed.scatter(got, ([Torch.ones(1), Torch.ones(2)] if rank.zero?))
      objects = Distributed.all_gather_object("x" * rank)
      [scalar.item, got.sum.item, objects]
    end
    assert_equal [[3.0, 1.0, ["", "x"]], [3.0, 2.0, ["", "x"]]], results
  end

  def test_with_detail_buckets_have_names
    said = world(2) do |rank|
      Distributed.set_debug_level(:detail)
      model = Torch::NN::Parallel::DistributedDataParallel.new(Torch::NN::Linear.new(2, 3))
      2.times { model.call(Torch.ones(1, 2)).sum.backward }
      failure { rank.zero? ? model.call(Torch.ones(1, 2)).sum.backward : Distributed.all_reduce(Torch.ones(5)) }
    end
    # In the order in which gradients came, which differs between versions of libtorch.
    bucket = /bucket 1 of 1: (weight \[3, 2\], bias \[3\]|bias \[3\], weight \[3, 2\])/
    said.each { |_, text| assert_match(/#{bucket}.*float32 \[5\]|float32 \[5\].*#{bucket}/, text) }
  end

  def test_without_it_only_sizes_are
    results = world(2) { |rank| Distributed.all_reduce(Torch.ones(SHAPES[rank])).sum.item }
    assert_equal [12.0, 12.0], results
  end
end
