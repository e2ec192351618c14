# What the peers of the comparisons have in common. The same stands in rank.rb for torch-ddp.
import json
import os
import sys
import time

import torch
import torch.distributed as dist


def answer_orders(do):
    """Reads an order of JSON from each line of standard input, has it done, and answers with a line of JSON."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    os.environ.setdefault("USE_LIBUV", "0")  # Debian's is built without it
    dist.init_process_group("gloo")
    print(json.dumps({"version": "PyTorch " + torch.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(do(json.loads(line))), flush=True)
    dist.destroy_process_group()


def milliseconds(steps, step):
    """Those of each step; all ranks begin together."""
    dist.barrier()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - started))
    return times
