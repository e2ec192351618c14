# frozen_string_literal: true

require_relative "data_parallel_training"

# Each option of the constructor: what it takes, and that training with it is that of one process.
class DataParallelOptionsTest < Minitest::Test
  include DataParallelTraining

  OPTIONS = {
    plain: {},
    small_buckets: {bucket_cap_mb: 0.0002},
    list_of_buckets: {bucket_cap_mb_list: [0.0001, 0.0004, 1]},
    gradients_apart: {gradient_as_bucket_view: false},
    gradients_apart_small: {gradient_as_bucket_view: false, bucket_cap_mb: 0.0002},
    static_graph: {static_graph: true},
    static_graph_apart: {static_graph: true, gradient_as_bucket_view: false, bucket_cap_mb: 0.0002},
    find_unused: {find_unused_parameters: true},
    find_unused_small: {find_unused_parameters: true, bucket_cap_mb: 0.0002},
    find_unused_apart: {find_unused_parameters: true, gradient_as_bucket_view: false},
    skip_unused: {find_unused_parameters: true, skip_all_reduce_unused_params: true, bucket_cap_mb: 0.0002},
    no_buffers: {broadcast_buffers: false},
    no_forward_buffers: {forward_sync_buffers: false},
    delayed: {
      delay_all_reduce_named_params: ->(net) { net.named_parameters.slice("third.weight", "first.bias").to_a },
      param_to_hook_all_reduce: ->(net) { net.named_parameters["first.weight"] }
    },
    delayed_by_one_of_them: {
      delay_all_reduce_named_params: %w[third.weight first.bias], param_to_hook_all_reduce: "first.bias", bucket_cap_mb: 0.0002
    },
    mesh: {device_mesh: ->(_) { Torch::Distributed.init_device_mesh(:cpu, [Torch::Distributed.get_world_size]) }},
    cpu: {device_ids: ["cpu"], output_device: "cpu", dim: 0}
  }.freeze

  def self.expected(dtype)
    @expected ||= {}
    @expected[dtype] ||= yield
  end

  def expected(dtype)
    self.class.expected(dtype) { alone_trained(dtype: dtype) }
  end

  # All of them on two ranks; and every third on each of the other numbers, in turns with both dtypes.
  CASES = OPTIONS.each_with_index.flat_map { |(name, _), index|
    [[name, 2, :float64], [name, [1, 3, 4][index % 3], index.even? ? :float32 : :float64]]
  }.group_by { |_, size, _| size }.freeze

  CASES.each do |size, cases|
    define_method(:"test_training_on_#{size}_is_that_of_one_process") do
      results = world(size) do |rank|
        cases.map do |name, _, dtype|
          train(rank, size, dtype: dtype, **OPTIONS.fetch(name))
        rescue => e
          raise "#{name}, #{dtype}: #{e.class}: #{e.message}"
        end
      end
      cases.zip(*results) do |(name, _, dtype), *ranks|
        message = "#{name}, #{dtype}, on #{size}"
        assert_equal 1, ranks.uniq.size, "ranks differ: #{message}"
        expected(dtype).zip(ranks.first) { |one, other| assert_follows(one, other, TOLERANCE.fetch(dtype), message) }
      end
    end
  end

  def test_init_sync_false_leaves_parameters_alone
    results = world(2) do |rank|
      net = Torch::NN::Linear.new(2, 2, bias: false)
      Torch.no_grad { net.parameters.first.fill!(rank) }
      DDP.new(net, init_sync: false)
      net.parameters.first.detach.to_a.flatten.uniq
    end
    assert_equal [[0.0], [1.0]], results
  end

  def test_forward_sync_buffers_false_still_sends_them_once
    results = world(2) do |rank|
      means = [{forward_sync_buffers: false}, {broadcast_buffers: false}].map do |options|
        net = Normed.new
        mean = net.instance_variable_get(:@norm).running_mean
        mean.fill!(rank + 1.0)
        model = DDP.new(net, **options)
        before = mean.to_a.uniq
        raise "will sync" if model.will_sync_module_buffers?

        model.call(Torch.full([4, 3], rank * 100.0)).sum.backward
        [before, mean.to_a]
      end
      [*means, DDP.new(Normed.new).will_sync_module_buffers?, DDP.new(Odd.new).will_sync_module_buffers?]
    end
    assert_equal [[[1.0]], [[1.0]]], [results[0][0][0..0], results[1][0][0..0]]
    assert_equal [[[1.0]], [[2.0]]], [results[0][1][0..0], results[1][1][0..0]]
    refute_equal results[0][0][1], results[1][0][1]
    results.each { |result| assert_equal [true, false], result.last(2) }
  end

  # Gradients are in the buckets; with gradient_as_bucket_view: false they take their memory once more.
  def test_memory_of_gradients
    times = world(2) do
      [true, false].map do |view|
        net = Torch::NN::Sequential.new(Torch::NN::Linear.new(64, 64), Torch::NN::Linear.new(64, 128))
        GC.start
        before = Distributed.memory_stats[:current_bytes]
        model = DDP.new(net, gradient_as_bucket_view: view)
        # A thread of its own, with which all that its stack refers to ends.
        Thread.new { 3.times { model.call(Torch.ones(1, 64)).sum.backward } }.join
        GC.start
        [Distributed.memory_stats[:current_bytes] - before, model.bucket_sizes.sum].map { |bytes| bytes.fdiv(3 * 64 * 65 * 4).round(1) }
      end
    end
    assert_equal [[[1.0, 1.0], [2.0, 1.0]]] * 2, times
  end

  def test_a_mesh_of_one_dimension
    results = world(4) do |rank|
      mesh = Torch::Distributed.init_device_mesh(:cpu, [2, 2], mesh_dim_names: %w[dp tp])
      said = failure { DDP.new(Odd.new, device_mesh: mesh) }
      net = Torch::NN::Linear.new(1, 1, bias: false)
      model = DDP.new(net, device_mesh: mesh["dp"])
      model.call(Torch.tensor([[rank.to_f]])).sum.backward
      [said, net.parameters.first.grad.sum.item, model.process_group.ranks]
    end
    assert_equal [[1.0, [0, 2]], [2.0, [1, 3]], [1.0, [0, 2]], [2.0, [1, 3]]], results.map { |result| result.drop(1) }
    results.each { |(name, text), *| assert_match(/ArgumentError.*device_mesh: expected a mesh of one dimension.*mesh\["dp"\]/, "#{name} #{text}") }
  end

  def test_buckets_by_a_list
    sizes = world(1) do
      layers = Array.new(5) { Torch::NN::Linear.new(300, 300) }
      model = DDP.new(Torch::NN::Sequential.new(*layers), bucket_cap_mb_list: [0.3, 0.6])
      2.times { model.call(Torch.ones(1, 300)).sum.backward }
      model.bucket_sizes.map { |bytes| (bytes / 361_200.0).round }
    end.first
    assert_equal [1, 2, 2], sizes
  end

  WRONG = {
    {buket_cap_mb: 3} => /unknown keyword: :buket_cap_mb; expected some of .*bucket_cap_mb:/,
    {a: 1, b: 2} => /unknown keywords: :a, :b;/,
    {dim: "0"} => /dim: .*got "0"/,
    {static_graph: "yes"} => /static_graph: expected true or false, got "yes"/,
    {broadcast_buffers: true, forward_sync_buffers: false} => /broadcast_buffers: true contradicts forward_sync_buffers: false/,
    {broadcast_buffers: false, forward_sync_buffers: true} => /broadcast_buffers: false contradicts forward_sync_buffers: true/,
    {forward_sync_buffers: 1} => /forward_sync_buffers: .*got 1/,
    {bucket_cap_mb: 1, bucket_cap_mb_list: [1]} => /both given/,
    {bucket_cap_mb: 0} => /bucket_cap_mb: expected a positive number/,
    {bucket_cap_mb_list: []} => /bucket_cap_mb_list: .*got \[\]/,
    {bucket_cap_mb_list: [1, -2]} => /bucket_cap_mb_list\[1\]: .*got -2/,
    {bucket_cap_mb_list: [1, Float::NAN]} => /bucket_cap_mb_list\[1\]: .*got NaN/,
    {skip_all_reduce_unused_params: true} => /needs find_unused_parameters: true/,
    {delay_all_reduce_named_params: ["scale"]} => /param_to_hook_all_reduce: expected both or neither/,
    {param_to_hook_all_reduce: "scale"} => /expected both or neither, got the second alone/,
    {delay_all_reduce_named_params: ["scalp"], param_to_hook_all_reduce: "scale"} => /delay_all_reduce_named_params: .*got "scalp"/,
    {delay_all_reduce_named_params: [], param_to_hook_all_reduce: "scale"} => /expected \[name, parameter\] pairs/,
    {delay_all_reduce_named_params: [["scale", Torch.ones(3)]], param_to_hook_all_reduce: "scale"} => /own parameter at "scale"/,
    {delay_all_reduce_named_params: ["scale"], param_to_hook_all_reduce: Torch.ones(3)} => /param_to_hook_all_reduce: .*another tensor/,
    {device_mesh: 3} => /device_mesh: expected a Torch::Distributed::DeviceMesh, got 3/,
    {mixed_precision: :bfloat16} => /mixed_precision: .*got :bfloat16/
  }.freeze

  def test_wrong_and_contradictory_options_are_named
    alone do
      WRONG.each do |options, text|
        assert_match text, assert_raises(ArgumentError, options.inspect) { DDP.new(Odd.new, **options) }.message
      end
      mesh = Torch::Distributed.init_device_mesh(:cpu, [1])
      error = assert_raises(ArgumentError) { DDP.new(Odd.new, process_group: Distributed.default_process_group, device_mesh: mesh) }
      assert_match(/process_group: and device_mesh: are both given/, error.message)
    end
  end

  # Before anything is sent: no rank waits for one that makes no model.
  def test_wrong_options_are_told_on_every_rank
    said = world(3) { |rank| failure { DDP.new(Odd.new, skip_all_reduce_unused_params: true) } unless rank == 2 }
    assert_equal said[0], said[1]
    assert_equal ["ArgumentError", nil], [said[0][0], said[2]]
  end

  def test_options_that_differ_between_ranks_are_told_on_both
    said = world(2) { |rank| failure { DDP.new(Odd.new, find_unused_parameters: rank == 1) } }
    said.each { |name, _| assert_equal "Torch::Distributed::MismatchError", name }
  end

  def test_deprecated_and_needless_ones_are_warned_of
    alone do
      assert_output(nil, /check_reduction: true is deprecated/) { DDP.new(Odd.new, check_reduction: true) }
      assert_output(nil, /find_unused_parameters: is not needed/) { DDP.new(Odd.new, static_graph: true, find_unused_parameters: true) }
    end
  end
end
