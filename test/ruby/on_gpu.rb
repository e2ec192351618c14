# frozen_string_literal: true

require_relative "test_helper"

# Tests with a GPU's memory. On a machine with GPUs they run there; with the stand-ins for CUDA and NCCL
# (`rake test:stand_ins`) the CPU's tensors count as a GPU's, which shows the logic alone. Ranks share one GPU: NCCL lets
# them if each says that it is a host of its own.
module OnGPU
  STAND_INS = ENV["TDDP_STAND_IN_CUDA"] == "1"
  DEVICE = STAND_INS ? "cpu" : "cuda:0"
  MESH_DEVICE = STAND_INS ? "cpu" : "cuda"
  # A process that has asked CUDA for anything cannot hand it to its forks.
  START_METHOD = STAND_INS ? :fork : :spawn

  def setup
    # The process that spawned this one has asked.
    return if ENV[Torch::Distributed::SPAWN_ENV_KEY] == "1"

    skip "no GPU is here; `rake test:stand_ins` shows the logic without one" unless STAND_INS || Torch::CUDA.available?
    skip "NCCL is not here: #{Torch::Distributed.nccl_available?}" unless Torch::Distributed.nccl_available?
  end

  # Runs the block on each rank of a fresh world, within a group.
  #
  # @param apart [Boolean] whether each rank has a GPU of its own; else all share one
  def ranks(size, backend = "nccl", timeout: 30, apart: false, **options)
    Timeout.timeout(90) do
      Torch::Distributed.fork_world(size, start_method: START_METHOD) do |rank, port|
        if apart
          @device = "cuda:#{rank}"
          options[:device_id] = rank
        else
          share_gpu(rank)
        end
        Torch::Distributed.init_process_group(backend, timeout: timeout, **options)
        yield rank, port
      ensure
        Torch::Distributed.destroy_process_group
      end
    end
  end

  # A world whose ranks share a GPU, and one in which each has its own, if there are as many.
  #
  # @return [Array] the block's values in both
  def shared_and_apart(size, &block)
    apart = !STAND_INS && Torch::CUDA.device_count >= size
    [false, *(true if apart)].flat_map { |each| ranks(size, apart: each, &block) }
  end

  # @return [String] this rank's
  def device
    @device || DEVICE
  end

  # Makes a folder for the time of the block, whose name spawned processes find in the environment.
  def in_folder(variable = "TDDP_TEST_FOLDER")
    return yield ENV.fetch(variable) if ENV[Torch::Distributed::SPAWN_ENV_KEY] == "1"

    Dir.mktmpdir { |folder| with_env(variable => folder) { yield folder } }
  end

  # @return [String] a new folder in that one, the same on all ranks of a world
  def folder_of_world(folder)
    name = [(Dir.mktmpdir(nil, folder) if Torch::Distributed.get_rank.zero?)]
    Torch::Distributed.broadcast_object_list(name, src: 0)
    name.first
  end

  def share_gpu(rank)
    ENV["NCCL_HOSTID"] = "rank#{rank}"
    ENV["NCCL_SOCKET_IFNAME"] = "lo"
  end

  def filled(value, count = 5)
    Torch.full([count], value).to(device)
  end

  # @return [Array<String>] where the tensors are
  def devices(tensors)
    tensors.compact.map { |tensor| Torch::Distributed._device_name(tensor.device) }.uniq
  end
end
