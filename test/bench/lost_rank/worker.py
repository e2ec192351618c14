"""PyTorch's side of lost_rank.rb: all_reduces until an error comes, and when that was."""

import datetime
import os
import time

os.environ.setdefault("USE_LIBUV", "0")

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
tensor = torch.zeros(1000)
for _ in range(20):
    dist.all_reduce(tensor)
print("PyTorch %s" % torch.__version__, flush=True)
try:
    while True:
        dist.all_reduce(tensor)
except RuntimeError:
    print(time.monotonic_ns(), flush=True)
time.sleep(3600)  # until the measurement ends this process
