# frozen_string_literal: true

require_relative "../held_ports"
require_relative "../launch/launch_case"
require_relative "partner"

# PyTorch's own workers, of 1.13 or 2.x, under our torchrun: they meet in its store.
class TorchrunPythonTest < LaunchCase
  include HeldPorts
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
    run_torchrun(*flags, "--no-ruby", *@python, path, failures, env: {"GLOO_SOCKET_IFNAME" => "lo"})
  end

  def test_two_workers_reduce
    result = workers("--nproc-per-node=2")
    assert_code 0, result
    assert_equal ["rank 0 of 2 in attempt 0", "rank 1 of 2 in attempt 0"], result.out.lines(chomp: true).sort
  end

  # PyTorch's own timers, of workers that look for torchrun's pipe.
  def test_a_timer_of_pytorch_s
    path = File.join(@folder, "worker.py")
    File.write(path, <<~PYTHON)
      import os
      import time
      from torch.distributed.elastic import timer

      timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
      with timer.expires(after=600, scope="quick"):
          pass
      with timer.expires(after=0.01, scope="stuck"):
          time.sleep(600)
    PYTHON
    result = run_torchrun("--no-ruby", *@python, path)
    assert_code 1, result
    assert_match(/^  message   : the timer "stuck" expired$/, result.err)
  end

  # What users of Python's torchrun type.
  def test_no_python_is_no_ruby
    path = File.join(@folder, "worker.py")
    File.write(path, SUM)
    result = run_torchrun("--nproc_per_node=2", "--no_python", *@python, path, 0, env: {"GLOO_SOCKET_IFNAME" => "lo"})
    assert_code 0, result
    assert_equal ["rank 0 of 2 in attempt 0", "rank 1 of 2 in attempt 0"], result.out.lines(chomp: true).sort
  end

  def test_they_meet_again_after_a_restart
    result = workers("--nproc-per-node=3", "--max-restarts=1", failures: 1)
    assert_code 0, result
    assert_equal 3.times.map { |rank| "rank #{rank} of 3 in attempt 1" }, result.out.lines(chomp: true).sort
  end

  ELASTIC = <<~PYTHON
    import os
    import sys
    import time

    exec(open(sys.argv[1]).read())
    # The first world waits for the second, which is smaller, to end well.
    while int(os.environ["WORLD_SIZE"]) > 1:
        time.sleep(0.1)
  PYTHON

  # A node leaves, and the one that is left goes on alone, in a new world.
  def test_an_elastic_job
    path = File.join(@folder, "worker.py")
    File.write(path, SUM.sub("int(sys.argv[1])", "0").sub("dist.destroy_process_group()", "").concat("sys.stdout.flush()\n"))
    elastic = File.join(@folder, "elastic.py")
    File.write(elastic, ELASTIC)
    port = held_port
    flags = ["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:#{port}", "--rdzv-id=python",
      "--rdzv-conf=last_call_timeout=2", "--no-python"]
    first, second = 2.times.map do
      # The first hosts the endpoint, and stays.
      start(*flags, *@python, elastic, path, env: {"GLOO_SOCKET_IFNAME" => "lo"}).tap { eventually("the endpoint") { listening?(port) } }
    end
    [first, second].each { |run| run.await(/rank \d of 2 in attempt 0/) }
    second.signal(:INT)
    assert_code 130, second.finish
    result = first.finish
    assert_code 0, result
    assert_match(/^rank 0 of 1 in attempt 0$/, result.out)
  end
end
