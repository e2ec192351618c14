"""PyTorch's side of ruby_all_reduce.rb: times all_reduces of so many bytes, as often as asked on stdin.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say who takes part.
"""

import json
import os
import sys
import time

os.environ.setdefault("USE_LIBUV", "0")

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
tensor = torch.zeros(int(sys.argv[1]) // 8, dtype=torch.float64)
first = dist.get_rank() == 0
if first:
    print(json.dumps({"version": "PyTorch %s" % torch.__version__}), flush=True)

for line in sys.stdin:
    calls = int(line)
    for _ in range(100):
        dist.all_reduce(tensor)
    times = []
    clock = time.perf_counter_ns
    for _ in range(calls):
        started = clock()
        dist.all_reduce(tensor)
        times.append(clock() - started)
    if first:
        print(json.dumps(times), flush=True)

dist.destroy_process_group()
