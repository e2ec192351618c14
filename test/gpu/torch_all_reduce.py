"""PyTorch's side of bench.py: one rank that times all_reduces, by the same lines on stdin as all_reduce.c.

TDDP_BENCH_DEVICE=cpu takes Gloo and host memory instead of NCCL and a GPU, to try the program where there is none.
"""

import os
import sys
import time

os.environ.setdefault("USE_LIBUV", "0")

import torch
import torch.distributed as dist

MOST_BYTES = 64 << 20
ON_GPU = os.environ.get("TDDP_BENCH_DEVICE", "cuda") == "cuda"


def settle():
    if ON_GPU:
        torch.cuda.synchronize()


def each(tensor, calls):
    times = []
    for _ in range(calls):
        started = time.perf_counter_ns()
        dist.all_reduce(tensor)
        settle()
        times.append(time.perf_counter_ns() - started)
    return sorted(times)[calls // 2] / 1e3


def row(tensor, calls):
    started = time.perf_counter_ns()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(calls)]
    for work in works:
        work.wait()
    settle()
    return (time.perf_counter_ns() - started) / 1e3 / calls


torch.set_num_threads(1)
dist.init_process_group("nccl" if ON_GPU else "gloo")
whole = torch.zeros(MOST_BYTES // 4, dtype=torch.float32, device="cuda:0" if ON_GPU else "cpu")
version = "PyTorch %s" % torch.__version__
if ON_GPU:
    version += ", CUDA %s, NCCL %s" % (torch.version.cuda, ".".join(map(str, torch.cuda.nccl.version())))
print(version, flush=True)

for line in sys.stdin:
    way, size, calls = line.split()
    part = whole[: int(size) // 4]
    dist.all_reduce(part)
    settle()
    print("%.3f" % (each if way == "each" else row)(part, int(calls)), flush=True)

dist.destroy_process_group()
