# frozen_string_literal: true

module Torch
  module NN
    module Parallel
      class DistributedDataParallel < Module
        # Queries about a wrapped model.
        module Report
          # Sizes of the buckets in bytes, for the curious: the plan changes once, after the first backward.
          #
          # @return [Array<Integer>]
          def bucket_sizes
            @core.bucket_sizes
          end

          # What PyTorch logs of a model, under the same names: its shape, options and buckets, the order in which gradients
          # arrived, and times in ns. `avg_` times are those of the first ten iterations and of one in a hundred later.
          # What is not known yet is nil.
          #
          #   data = model.get_ddp_logging_data
          #   data[:rebuilt_bucket_sizes]            # [1471240, 1442400]
          #   data[:avg_backward_comm_time]          # 1830127
          #
          # @return [Hash{Symbol => Object}]
          def get_ddp_logging_data
            shape_data.merge(option_data, bucket_data, place_data, @logging.times(@core))
          end
          alias_method :_get_ddp_logging_data, :get_ddp_logging_data

          # @param sample_rate [Integer] of so many iterations one is looked at for the `avg_` times, after the first ten
          def set_ddp_runtime_logging_sample_rate(sample_rate)
            @logging.rate = sample_rate
            nil
          end
          alias_method :_set_ddp_runtime_logging_sample_rate, :set_ddp_runtime_logging_sample_rate

          private

          def shape_data
            trained = @parameters_of_model.trained
            {
              world_size: @process_group.size,
              rank: @process_group.rank,
              module_name: @module.class.name,
              backend_name: @process_group.backend,
              iteration: @rounds + @core.rounds,
              dtypes: trained.map(&:dtype).uniq,
              num_parameter_tensors: trained.size,
              total_parameter_size_bytes: trained.sum { |parameter| parameter.numel * parameter.element_size },
              is_multi_device_module: trained.map { |parameter| Torch::Distributed._device_name(parameter.device) }.uniq.size > 1,
              has_sync_bn: @module.modules.any? { |mod| mod.class.name.to_s.end_with?("SyncBatchNorm") }
            }
          end

          def option_data
            {
              broadcast_buffers: @arguments.forward_sync_buffers?,
              bucket_cap_bytes: @arguments.bucket_cap_bytes,
              find_unused_parameters: @arguments.find_unused?,
              gradient_as_bucket_view: @arguments.gradient_as_bucket_view?,
              static_graph: @arguments.static_graph?,
              device_ids: @device ? [Torch::Distributed._device_name(@device)] : [],
              output_device: (@arguments.output_device || @device)&.then { |device| Torch::Distributed._device_name(device) },
              comm_hook: @comm_hook&.name
            }
          end

          def bucket_data
            sizes = @core.bucket_sizes
            rebuilt = @core.rebuilt?
            order = @core.order
            {
              bucket_sizes: sizes,
              num_buckets_reduced: sizes.size,
              has_rebuilt_buckets: rebuilt,
              rebuilt_bucket_sizes: rebuilt ? sizes : nil,
              rebuilt_per_bucket_param_indices: rebuilt ? @core.bucket_params : nil,
              prev_iteration_grad_ready_order_indices: order.empty? ? nil : order
            }
          end

          def place_data
            {
              master_addr: ENV["MASTER_ADDR"],
              master_port: ENV["MASTER_PORT"],
              cuda_visible_devices: ENV["CUDA_VISIBLE_DEVICES"],
              gloo_socket_ifname: ENV["GLOO_SOCKET_IFNAME"],
              torch_distributed_debug: Torch::Distributed.get_debug_level.to_s.upcase
            }
          end
        end
      end
    end
  end
end
