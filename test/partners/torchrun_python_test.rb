# frozen_string_literal: true

require_relative "../launch/launch_case"
require_relative "partner"

# PyTorch's own workers, of 1.13 or 2.x, under our torchrun: they meet in its store.
class TorchrunPythonTest < LaunchCase
  include Partner

  SUM = <<~PYTHON
    import os
    import sys
    import torch
    import torch.distributed as dist

    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    try:
        dist.init_process_group("gloo")
    except RuntimeError as error:
        # Debian's PyTorch 2.6 is built without libuv, and yet asks for it wherever torchrun keeps the store.
        if "without libuv" not in str(error):
            raise
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        store = dist.TCPStore(*where, place["world_size"], False, use_libuv=False)
        dist.init_process_group("gloo", store=dist.PrefixStore(f"attempt_{attempt}", store), **place)
    rank = dist.get_rank()
    tensor = torch.full((3,), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(1, dist.get_world_size() + 1))] * 3, tensor
    dist.barrier()
    if attempt < int(sys.argv[1]) and rank == 1:
        sys.exit(3)
    dist.barrier()
    # One write, so that the lines of two ranks do not mix.
    os.write(1, f"rank {rank} of {dist.get_world_size()} in attempt {attempt}\\n".encode())
    dist.destroy_process_group()
  PYTHON

  def workers(*flags, failures: 0)
    path = File.join(@folder, "worker.py")
    File.write(path, SUM)
    run_torchrun(*flags, "--no-ruby", *@python, path, failures, env: {"GLOO_SOCKET_IFNAME" => "lo"}, limit: 60)
  end

  def test_two_workers_reduce
    result = workers("--nproc-per-node=2")
    assert_code 0, result
    assert_equal ["rank 0 of 2 in attempt 0", "rank 1 of 2 in attempt 0"], result.out.lines(chomp: true).sort
  end

  # What users of Python's torchrun type.
  def test_no_python_is_no_ruby
    path = File.join(@folder, "worker.py")
    File.write(path, SUM)
    result = run_torchrun("--nproc_per_node=2", "--no_python", *@python, path, 0, env: {"GLOO_SOCKET_IFNAME" => "lo"}, limit: 60)
    assert_code 0, result
    assert_equal ["rank 0 of 2 in attempt 0", "rank 1 of 2 in attempt 0"], result.out.lines(chomp: true).sort
  end

  def test_they_meet_again_after_a_restart
    result = workers("--nproc-per-node=3", "--max-restarts=1", failures: 1)
    assert_code 0, result
    assert_equal 3.times.map { |rank| "rank #{rank} of 3 in attempt 1" }, result.out.lines(chomp: true).sort
  end
end
