# frozen_string_literal: true

module Torch
  module Distributed
    # Which backend serves which device.
    module Devices
      # The backend for each kind of device.
      DEFAULT_DEVICE_BACKENDS = {"cpu" => "gloo", "cuda" => "nccl"}.freeze

      # @param device [String, Symbol, Integer, Torch::Device, nil] nil: the GPU if there is one, else the CPU;
      #   an integer: the GPU of that number where there are GPUs
      # @return [String] "gloo" or "nccl"
      # @raise [ArgumentError] for a device that no backend serves
      def get_default_backend_for_device(device)
        type = device_type(device)
        DEFAULT_DEVICE_BACKENDS.fetch(type) do
          raise ArgumentError, "no backend for device #{device.inspect}: expected one of " \
            "#{DEFAULT_DEVICE_BACKENDS.keys.join(", ")}"
        end
      end

      # @return [Boolean] whether the backend of this name can be loaded here
      def backend_available?(name)
        ProcessGroup._find_backend(name.to_s)
        true
      rescue UnavailableError
        false
      end

      # @return [Boolean]
      def gloo_available?
        backend_available?("gloo")
      end

      # @return [Boolean]
      def nccl_available?
        backend_available?("nccl")
      end

      # @return [Boolean]
      def mpi_available?
        backend_available?("mpi")
      end

      # Torch::Device has a `to_s` from torch-rb 0.23 on only; older tensors say their device as a String.
      #
      # @api private
      # @param device [String, Torch::Device]
      # @return [String] "cpu", "cuda", "cuda:1" ...
      def _device_name(device)
        return device unless device.is_a?(Torch::Device)

        device.index? ? "#{device.type}:#{device.index}" : device.type
      end

      private

      def cuda?
        Torch::CUDA.available?
      end

      def device_type(device)
        case device
        when nil, Integer then cuda? ? "cuda" : "cpu"
        when Torch::Device then device.type
        when String, Symbol then device.to_s[/\A[a-z]+(?=(:\d+)?\z)/]
        else raise ArgumentError, "device: expected a String, a Symbol or a Torch::Device, got #{device.inspect}"
        end
      end

      # For tensors of both kinds, where there are GPUs and none is named.
      def default_backend(device_id)
        return get_default_backend_for_device(device_id) unless device_id.nil? && cuda?

        DEFAULT_DEVICE_BACKENDS.map { |device, name| "#{device}:#{name}" }.join(",")
      end

      # Where what this library itself exchanges in a group is: in host memory, or, with nccl alone, on the GPU of this process.
      def group_device(group)
        return "cpu" unless cuda? && /\A(cuda:)?nccl\z/.match?(group.backend)

        default = default_here
        default ? "cuda:#{device_index(default.device_id, default.group.rank, default.group.size)}" : "cuda"
      end

      def group_tensor(group, values, dtype)
        Torch.tensor(values, dtype: dtype, device: group_device(group))
      end

      # The GPU that a rank uses with nccl.
      def device_index(device_id, rank, world_size)
        case device_id
        when Integer then device_id
        when Torch::Device then device_id.index
        when String, Symbol then Integer(device_id.to_s[/\d+\z/] || 0, 10)
        when nil then Rendezvous.env_integer("LOCAL_RANK") || rank % (Rendezvous.env_integer("LOCAL_WORLD_SIZE") || world_size)
        else raise ArgumentError, "device_id: expected a GPU's number or a Torch::Device, got #{device_id.inspect}"
        end
      end
    end

    # See {Devices::DEFAULT_DEVICE_BACKENDS}.
    DEFAULT_DEVICE_BACKENDS = Devices::DEFAULT_DEVICE_BACKENDS
  end
end
