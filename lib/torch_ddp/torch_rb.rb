# frozen_string_literal: true

module TorchDDP
  # What scripts for torch-ddp 0.3 call and torch-rb, up to a version or up to now, lacks. Each stands alone, and is added only where
  # it is missing. Nothing that torch-rb has is replaced, but for the results of {DeviceName} and {Item}, which its later versions
  # correct too.
  module TorchRb
    # For `Torch::CUDA`: torch-rb has neither (0.26).
    module CUDA
      # Makes a GPU the one that "cuda" means, in this thread.
      #
      # @param device [Integer, String, Torch::Device] 1, "cuda:1"
      # @return [nil]
      # @raise [ArgumentError] for what is no GPU's name
      # @raise [Torch::Error] without that GPU
      def set_device(device)
        index = device.is_a?(Integer) ? device : Torch::Distributed._device_name(device).to_s[/\Acuda:(\d+)\z/, 1]&.to_i
        raise ArgumentError, "device: expected a GPU's number or \"cuda:1\", for instance, got #{device.inspect}" if index.nil? || index.negative?

        Torch::Distributed.send(:_set_device, index)
      end

      # Returns to the driver the memory that libtorch keeps for later tensors on GPUs. Does nothing without CUDA.
      #
      # @return [nil]
      def empty_cache
        Torch::Distributed.send(:_empty_cache)
      end
    end

    # For `Torch`: its `load` takes a file's name alone (0.26).
    module Load
      # With a keyword the file is read without running any code of it, and also one that has tensors of GPUs, where there
      # are none, or a model's state_dict from PyTorch.
      #
      # @param file [String] of `Torch.save` or torch.save
      # @param map_location [String, Symbol, Torch::Device, Hash, #call, nil] the device for all tensors; a Hash: devices by where
      #   the tensors were, others stay there; or what is called with a flat CPU tensor of elements that several tensors may
      #   have, and with where they were, "cuda:0", and returns them where they shall be, or nil; nil: where they were
      # @param weights_only [Boolean] true refuses what is no tensor, number, text, list or dict; that is refused anyway
      # @return [Object] what was saved
      # @raise [ArgumentError] for another `map_location`
      # @raise [Torch::Error] for a file that cannot be loaded, or a device that is not there
      def load(file, map_location: nil, weights_only: false)
        return super(file) if map_location.nil? && !weights_only

        Torch::Distributed::Checkpoint::TorchFile.read(file, MapLocation.new(map_location))
      end
    end

    # Where {Load} puts tensors.
    #
    # @api private
    class MapLocation
      def initialize(map)
        @map = map
        return if [NilClass, String, Symbol, Torch::Device, Hash].any? { |kind| map.is_a?(kind) } || map.respond_to?(:call)

        raise ArgumentError, "map_location: expected a device, a Hash of devices, something to call or nil, got #{map.inspect}"
      end

      # @param tensor [Torch::Tensor] on the CPU
      # @param location [String] where it was
      # @return [Torch::Tensor]
      def call(tensor, location)
        if @map.respond_to?(:call) && !@map.is_a?(Hash)
          mapped = @map.call(tensor, location)
          raise Torch::Error, "map_location: expected a tensor or nil from the call, got #{mapped.class}" unless mapped.nil? || mapped.is_a?(Torch::Tensor)
        end
        mapped || to(tensor, name(target(location)))
      end

      private

      def target(location)
        case @map
        when Hash then @map.find { |from, _| name(from) == location }&.last || location
        when String, Symbol, Torch::Device then @map
        else location
        end
      end

      def name(device)
        Torch::Distributed._device_name(device).to_s
      end

      def to(tensor, device)
        return tensor if device == "cpu"
        raise Torch::Error, "the file has tensors for #{device}, and there is no GPU: give map_location: \"cpu\"" if device.start_with?("cuda") && !Torch::CUDA.available?

        tensor.to(device)
      end
    end

    # For `Torch::Device`: before torch-rb 0.23 `to_s` is what `inspect` is.
    module DeviceName
      # @return [String] "cpu", "cuda:1"
      def to_s
        Torch::Distributed._device_name(self)
      end
    end

    # For `Torch::Tensor`: before torch-rb 0.23 the item of a tensor of shape [1, 1] is an Array.
    module Item
      # @return [Numeric, Boolean] of a tensor of one element
      def item
        value = super
        value.is_a?(Array) ? value.flatten.first : value
      end
    end

    class << self
      # Where torch-rb has a method of {CUDA} itself, its own is called.
      #
      # @return [void]
      def complete
        Torch::CUDA.extend(CUDA)
        keywords = Torch.method(:load).parameters.map(&:last)
        Torch.singleton_class.prepend(Load) unless (%i[map_location weights_only] - keywords).empty?
        return unless Gem::Version.new(Torch::VERSION) < Gem::Version.new("0.23.0")

        Torch::Device.prepend(DeviceName)
        Torch::Tensor.prepend(Item)
      end
    end
  end
end
