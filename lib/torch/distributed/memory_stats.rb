# frozen_string_literal: true

module Torch
  module Distributed
    # How many bytes this process's tensors take, now and at most.
    #
    #   Torch::Distributed.track_memory                     # before the model is made
    #   …
    #   Torch::Distributed.reset_peak_memory_stats
    #   train(batch)
    #   Torch::Distributed.memory_stats[:peak_bytes]
    #
    # Counted are the storages of tensors, each once however many views it has, and the memory of process groups: gradient
    # buckets, the parts of sharded models, {SharedTensors#empty_shared}. Not counted is what operations use within
    # themselves, tensors over a mapped file, and the buffers by which ranks communicate.
    #
    # A tensor whose Ruby object has not been collected yet still has its memory, and is counted: see {KeptMemory#keep_memory}.
    module MemoryStats
      # Counts tensors on the CPU from now on; those that there are already never are. The first {#memory_stats} does the
      # same. Until then nothing is counted but the memory of groups: counting takes some 20 ns for each new tensor.
      #
      # @return [nil]
      # @raise [UnsupportedError] if another library has replaced libtorch's allocator for good
      def track_memory
        _track_tensors
      end

      # @param device [String, Symbol, Integer, Torch::Device, nil] nil: the CPU; a GPU, or its number, has libtorch's counts of
      #   it, of all tensors since the process began
      # @return [Hash{Symbol => Integer}] `:current_bytes`; `:peak_bytes`, the most at once since the last
      #   {#reset_peak_memory_stats}; `:allocations`, the number of all made so far, freed ones included
      # @raise [ArgumentError] for another kind of device
      # @raise [UnsupportedError] for a GPU if this libtorch has no CUDA
      def memory_stats(device = nil)
        index = counted_device(device)
        track_memory if index.negative?
        %i[current_bytes peak_bytes allocations].zip(_memory_stats(index)).to_h
      end

      # The peak is what there is now.
      #
      # @param device [String, Symbol, Integer, Torch::Device, nil] as for {#memory_stats}
      # @return [nil]
      def reset_peak_memory_stats(device = nil)
        index = counted_device(device)
        track_memory if index.negative?
        _reset_peak_memory(index)
      end

      private

      # A GPU's number; the CPU is -1.
      def counted_device(device)
        return device if device.is_a?(Integer) && device >= 0

        name = device.nil? ? "cpu" : _device_name(device).to_s
        return -1 if name == "cpu"

        found = name.match(/\Acuda(?::(\d+))?\z/)
        raise ArgumentError, "device: expected \"cpu\", \"cuda\", \"cuda:0\" or a GPU's number, got #{device.inspect}" unless found

        found[1].to_i
      end
    end
  end
end
