# frozen_string_literal: true

require_relative "data_parallel_training"

class DataParallelReportTest < Minitest::Test
  include DataParallelTraining

  PYTORCH = %i[rank world_size module_name backend_name dtypes iteration broadcast_buffers bucket_cap_bytes bucket_sizes num_buckets_reduced
    rebuilt_bucket_sizes rebuilt_per_bucket_param_indices has_rebuilt_buckets prev_iteration_grad_ready_order_indices num_parameter_tensors
    total_parameter_size_bytes find_unused_parameters gradient_as_bucket_view static_graph is_multi_device_module has_sync_bn
    output_device device_ids master_addr master_port cuda_visible_devices gloo_socket_ifname torch_distributed_debug comm_hook
    forward_compute_time backward_compute_time backward_comm_time backward_compute_comm_overlap_time
    avg_forward_compute_time avg_backward_compute_time avg_backward_comm_time avg_backward_compute_comm_overlap_time
    forward_compute_time_start backward_compute_time_start backward_comm_time_start backward_compute_time_end backward_comm_time_end].freeze
  TIMES = PYTORCH.select { |name| name.to_s.include?("_time") }

  def test_before_and_after
    results = world(2) do
      layers = Array.new(3) { Torch::NN::Linear.new(300, 300) }
      net = Torch::NN::Sequential.new(*layers)
      model = DDP.new(net, bucket_cap_mb: 0.5, static_graph: false)
      before = model.get_ddp_logging_data
      4.times { model.call(Torch.ones(1, 300)).sum.backward }
      [before, model.get_ddp_logging_data]
    end
    layer = (300 * 300 + 300) * 4
    results.each_with_index do |(before, after), rank|
      assert_equal PYTORCH.sort, after.keys.sort
      assert_equal before.keys.sort, after.keys.sort
      assert_equal [rank, 2, "Torch::NN::Sequential", "gloo", [:float32], 6, 3 * layer, 524_288, true, false, true],
        after.values_at(:rank, :world_size, :module_name, :backend_name, :dtypes, :num_parameter_tensors, :total_parameter_size_bytes,
          :bucket_cap_bytes, :broadcast_buffers, :find_unused_parameters, :gradient_as_bucket_view)
      assert_equal [0, [3 * layer], false, nil, nil], before.values_at(:iteration, :bucket_sizes, :has_rebuilt_buckets, :rebuilt_bucket_sizes, :prev_iteration_grad_ready_order_indices)
      assert_equal [4, 3 * layer, true], [after[:iteration], after[:rebuilt_bucket_sizes].sum, after[:has_rebuilt_buckets]]
      assert_equal (0..5).to_a, after[:rebuilt_per_bucket_param_indices].flatten.sort
      assert_equal (0..5).to_a, after[:prev_iteration_grad_ready_order_indices].sort
      assert_operator after[:num_buckets_reduced], :>, 1
      assert_equal [nil], before.values_at(*TIMES).uniq
      TIMES.each { |name| assert_kind_of Integer, after[name], name }
      assert_operator after[:forward_compute_time], :<, 10_000_000_000
      assert_equal after[:backward_comm_time], after[:backward_comm_time_end] - after[:backward_comm_time_start]
      assert_operator after[:backward_compute_time_start], :<=, after[:backward_compute_time_end]
    end
  end

  def test_options_and_hooks_are_in_it
    data = world(1) do
      model = DDP.new(Normed.new, find_unused_parameters: true, gradient_as_bucket_view: false, forward_sync_buffers: false)
      model.register_comm_hook(:bf16_compress)
      model.get_ddp_logging_data
    end.first
    assert_equal [true, false, false, "bf16_compress", 26_214_400], data.values_at(:find_unused_parameters, :gradient_as_bucket_view, :broadcast_buffers, :comm_hook, :bucket_cap_bytes)
  end

  # Torch-rb's devices have no text of their own before 0.23.
  def test_devices_are_named
    data = world(1) do
      [DDP.new(Odd.new), DDP.new(Odd.new, device_ids: ["cpu"]), DDP.new(Odd.new, output_device: Torch.device("cpu:0"))].map(&:get_ddp_logging_data)
    end.first
    assert_equal [[[], nil, false], [["cpu"], "cpu", false], [[], "cpu:0", false]], data.map { |each| each.values_at(:device_ids, :output_device, :is_multi_device_module) }
  end

  def test_sample_rate
    alone do
      model = DDP.new(Odd.new)
      assert_nil model.set_ddp_runtime_logging_sample_rate(1)
      assert_match(/sample_rate: .*got 0/, assert_raises(ArgumentError) { model.set_ddp_runtime_logging_sample_rate(0) }.message)
    end
  end
end
