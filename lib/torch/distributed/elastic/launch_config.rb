# frozen_string_literal: true

module Torch
  module Distributed
    module Elastic
      # How {Elastic.launch} starts workers. All but the first five are handed to torchrun as they are; `torchrun --help` explains them.
      #
      # @!attribute [rw] min_nodes
      #   @return [Integer] how many nodes the job needs; each calls {Elastic.launch}; default 1
      # @!attribute [rw] max_nodes
      #   @return [Integer] how many it takes; default: as many as it needs
      # @!attribute [rw] nproc_per_node
      #   @return [Integer, String, Symbol] workers of this node, or "auto", "cpu" or "gpu"; default 1
      # @!attribute [rw] max_restarts
      #   @return [Integer] how often all workers are started again after a failure; default 3, as in PyTorch
      # @!attribute [rw] rdzv_configs
      #   @return [Hash] torchrun's `--rdzv-conf`; "rank" is this node's rank
      # @!attribute [rw] rdzv_timeout
      #   @return [Numeric, nil] seconds to wait for the other nodes: "join_timeout" of `rdzv_configs`
      # @!attribute [rw] rdzv_backend
      #   @return [String] "c10d" (the default), "static" or "etcd"
      # @!attribute [rw] rdzv_endpoint
      #   @return [String, nil] where nodes meet; a single node needs none
      # @!attribute [rw] run_id
      #   @return [String, nil] the job's name, the same on all nodes
      # @!attribute [rw] role
      #   @return [String]
      # @!attribute [rw] monitor_interval
      #   @return [Numeric] no effect, as for torchrun
      # @!attribute [rw] start_method
      #   @return [String, Symbol] no effect, as for torchrun: workers are new processes
      # @!attribute [rw] local_addr
      #   @return [String, nil]
      # @!attribute [rw] log_dir
      #   @return [String, nil]
      # @!attribute [rw] redirects
      #   @return [String, Integer, nil]
      # @!attribute [rw] tee
      #   @return [String, Integer, nil]
      # @!attribute [rw] log_line_prefix_template
      #   @return [String, nil]
      # @!attribute [rw] signals_to_handle
      #   @return [String, nil]
      LaunchConfig = Struct.new(:min_nodes, :max_nodes, :nproc_per_node, :max_restarts, :rdzv_configs, :rdzv_timeout, :rdzv_backend,
        :rdzv_endpoint, :run_id, :role, :monitor_interval, :start_method, :local_addr, :log_dir, :redirects, :tee, :log_line_prefix_template,
        :signals_to_handle, keyword_init: true) do
        def initialize(min_nodes: 1, max_nodes: min_nodes, nproc_per_node: 1, max_restarts: 3, rdzv_configs: {}, rdzv_backend: "c10d",
          role: "default_role", monitor_interval: 0.1, start_method: "spawn", **others)
          super
        end

        # @api private
        # @return [Array<String>] torchrun's flags
        # @raise [ArgumentError, TypeError] naming the setting that is wrong
        def flags
          check
          conf = rdzv_configs.transform_keys(&:to_s)
          conf["join_timeout"] = rdzv_timeout.ceil if rdzv_timeout
          values = {
            nnodes: (min_nodes == max_nodes) ? min_nodes : "#{min_nodes}:#{max_nodes}",
            node_rank: conf.delete("rank"),
            rdzv_conf: conf.map { |name, value| "#{name}=#{value}" }.join(","),
            rdzv_id: run_id,
            **to_h.except(:min_nodes, :max_nodes, :rdzv_configs, :rdzv_timeout, :run_id)
          }
          values.reject { |_, value| value.to_s.empty? }.map { |name, value| "--#{name.to_s.tr("_", "-")}=#{value}" }
        end

        private

        def check
          check_count("min_nodes", min_nodes, 1)
          check_count("max_nodes", max_nodes, min_nodes)
          check_count("max_restarts", max_restarts, 0)
          check_count("nproc_per_node", nproc_per_node, 1) unless %w[auto cpu gpu].include?(nproc_per_node.to_s)
          raise TypeError, "rdzv_configs: expected a Hash, got #{rdzv_configs.inspect}" unless rdzv_configs.is_a?(Hash)
          return if rdzv_timeout.nil? || (rdzv_timeout.is_a?(Numeric) && rdzv_timeout.positive?)

          raise ArgumentError, "rdzv_timeout: expected a positive number of seconds or nil, got #{rdzv_timeout.inspect}"
        end

        def check_count(name, value, least)
          return if value.is_a?(Integer) && value >= least

          raise ArgumentError, "#{name}: expected a whole number from #{least}, got #{value.inspect}"
        end
      end
    end
  end
end
