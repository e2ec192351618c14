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
      # same. Until then nothing is counted but the memory of groups: each new tensor takes up to
      # 40 ns more then, and 64 bytes that are not counted.
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

      # Estimates what a rank will hold of a model at most, for each way to distribute it.
      #
      #   puts Torch::Distributed.estimate_memory(model, optimizer: :adamw, world_size: 4, batch: x, limit: 8 << 30)
      #
      # Parameters, gradients and the optimizer's state are computed, those that the model has in several places counted once.
      # An optimizer's step is measured, on a small parameter of each dtype. Units are the model's own, if it is sharded
      # ({FSDP}); else those that one would make: each entry of the ModuleList or Sequential with the most parameters, and the rest
      # as the model's. With two-dimensional meshes, `world_size` is that of the dimension along which they are sharded.
      #
      # With `batch:` forward and backward run three times, on the model's device: so the process must not be forked for
      # training afterwards (libtorch 2), and the model must not be a part of something that is training. It has the same gradients,
      # buffers and random numbers afterwards. For a model that is sharded this is a collective call.
      #
      # The totals are for programs in which Ruby's garbage is collected between two steps ({KeptMemory#keep_memory}, which
      # DistributedDataParallel does by itself), and not within one. So what a checkpointed layer has computed is no activation
      # any more, but still among the temporaries. A fused optimizer leaves none. Not in the totals: the memory of the full model on
      # each rank before it is sharded, buffers by which ranks communicate.
      #
      # @param model [Torch::NN::Module] not a DistributedDataParallel, but the module in it
      # @param optimizer [Symbol, Class, Integer, #call] `:sgd`, `:sgd_momentum`, `:adam`, `:adamw`, `:fused_adam`,
      #   `:fused_adamw`, `:rmsprop`, `:adagrad`, `:adadelta`, `:adamax`; a class; something that makes one of the parameters
      #   it is called with; or the bytes of its state for each element
      # @param world_size [Integer, nil] ranks; nil: those of the default group
      # @param strategy [Symbol, Array<Symbol>, nil] some of {MemoryEstimate::STRATEGIES}; nil: all
      # @param mixed_precision [FSDP::MixedPrecisionPolicy, Torch::NN::Parallel::MixedPrecision, Symbol, nil] a Symbol: the dtype
      #   in which forward and backward are computed. Activations are scaled with it, rather than measured
      # @param batch [Torch::Tensor, Array, nil] the model's input, or an Array of all its inputs
      # @param checkpoint_ratio [Numeric, nil] the share of layers that are checkpointed meanwhile, see
      #   {Torch::Utils::Checkpoint::SelectiveCheckpointing}
      # @param limit [Numeric, nil] bytes that a rank may take
      # @yieldparam output [Object] the model's
      # @yieldreturn [Torch::Tensor] the loss; without a block the output's sum, which takes no memory worth counting
      # @return [MemoryEstimate]
      # @raise [ArgumentError, TypeError] naming the argument that is wrong
      def estimate_memory(model, optimizer: :adam, world_size: nil, strategy: nil, mixed_precision: nil, batch: nil, checkpoint_ratio: nil,
        limit: nil, &loss)
        MemoryEstimate.of(model, optimizer: optimizer, world_size: world_size, strategy: strategy, mixed_precision: mixed_precision,
          batch: batch, checkpoint_ratio: checkpoint_ratio, limit: limit, loss: loss)
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
