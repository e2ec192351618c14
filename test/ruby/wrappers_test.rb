# frozen_string_literal: true

require_relative "sharded_training"

# What wrappers of models and small values say of themselves.
class WrappersTest < Minitest::Test
  include ShardedTraining

  Shards = Torch::Distributed::Tensor

  class Model < Torch::NN::Module
    attr_accessor :epoch

    def initialize
      super
      @layers = Torch::NN::ModuleList.new(Array.new(40) { Torch::NN::Linear.new(2, 2) })
    end

    def configure_optimizers
      :made
    end

    def forward(x)
      @layers.each { |layer| x = layer.call(x) }
      x
    end
  end

  def test_a_method_of_the_model_is_not_the_wrappers
    found = world(1) do
      [Torch::NN::Parallel::DistributedDataParallel, FSDP::FullyShardedDataParallel, Torch::NN::DataParallel].map do |kind|
        wrapper = kind.new(Model.new)
        calls = [-> { wrapper.configure_optimizers }, -> { wrapper.epoch = 3 }, -> { wrapper.no_such_method }]
        texts = calls.map { |call| assert_raises(NoMethodError, &call).message }
        [kind.name, texts, wrapper.inspect, wrapper.to_s, wrapper.module.configure_optimizers, wrapper.respond_to?(:configure_optimizers),
          wrapper.module.inspect.scan("Linear(in_features: 2").size]
      end
    end.first
    found.each do |name, (method, writer, none), shown, text, value, responds, layers|
      assert_match(/\Aundefined method `configure_optimizers' for a #{name}: the WrappersTest::Model within it has it, so call model.module.configure_optimizers/, method)
      assert_match(/model.module.epoch=/, writer)
      assert_match(/undefined method [`']no_such_method'/, none)
      assert_operator [method, writer, none].map { |each| each.lines.size }.max, :<, 10
      assert_equal ["#<#{name} of a WrappersTest::Model>"] * 2, [shown, text]
      assert_equal [:made, false, 40], [value, responds, layers]
    end
  end

  # As keys of a Hash and in uniq.
  def test_what_is_equal_is_one
    found = world(2) do
      group = Torch::Distributed.default_process_group
      mesh = -> { Torch::Distributed::DeviceMesh.new("cpu", [0, 1], mesh_dim_names: ["dp"]) }
      layout = ->(dim) { Shards::Layout.new(group, [4, 2], dim: dim) }
      equal = [[Shards.shard(0), Shards.shard(0)], [Shards.replicate, Shards.replicate], [layout.call(0), layout.call(0)], [mesh.call, mesh.call]]
      apart = [[Shards.shard(0), Shards.shard(1)], [Shards.replicate, Shards.replicate(gradient: :partial)], [layout.call(0), layout.call(1)],
        [Shards.shard(0), Shards.replicate]]
      [[equal, apart].map { |pairs| pairs.map { |one, other| [one == other, one.eql?(other), [one, other].uniq.size, {one => 1}.key?(other)] }.uniq },
        group.to_s == group.inspect, layout.call(0).to_s]
    end
    assert_equal [[[[[true, true, 1, true]], [[false, false, 2, false]]], true, "shard(0) of [4, 2] over 2"]] * 2, found
  end
end
