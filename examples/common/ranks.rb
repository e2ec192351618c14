# frozen_string_literal: true

require "torch/distributed"

# The processes of an example: those that a launcher started, torchrun, srun or mpirun, or new ones on this machine.
module Ranks
  module_function

  # One process that a scheduler started may start others itself.
  #
  # @return [Boolean] whether a launcher started this process as one of several
  def launched?
    ENV.key?("RANK") || launched_size > 1
  end

  # @return [Integer] processes that the launcher started; 1 without one
  def launched_size
    Integer(Torch::Distributed.launch_variables.fetch("WORLD_SIZE", "1"))
  end

  # @return [Boolean] whether this process is the first of those that the launcher started
  def first_launched?
    Torch::Distributed.launch_variables["RANK"] == "0"
  end

  # @return [Integer] GPUs of this machine
  def gpus
    Torch::CUDA.available? ? Torch::CUDA.device_count : 0
  end

  # Runs the block on each rank, where `init_process_group` finds its place without arguments.
  #
  # @param count [Integer] processes to start; a launcher has decided this itself
  # @return [Array] the block's values by rank; under a launcher this rank's alone
  def run(count, &block)
    launched? ? [block.call] : start(count, &block)
  end

  # A launcher reports Ctrl-C itself; here this process does.
  def start(count, &block)
    Torch::Distributed.fork_world(count, start_method: :spawn) { block.call }
  rescue Interrupt
    warn "interrupted"
    exit 130
  end

  # @return [Torch::Device] this rank's GPU where there are GPUs and the backend serves them, else the CPU
  def device(backend = nil)
    return Torch.device("cpu") if gpus.zero? || backend == "gloo"

    Torch.device("cuda:#{Torch::Distributed.get_node_local_rank(0) % gpus}")
  end

  # @return [Array<Integer>, nil] what DistributedDataParallel takes as device_ids
  def device_ids(device)
    [device.index] if device.type == "cuda"
  end
end
