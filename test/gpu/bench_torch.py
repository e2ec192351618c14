"""PyTorch's side of bench.py: one rank that times operations, by the same lines on stdin as bench.c.

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
DEVICE = "cuda:%s" % os.environ["LOCAL_RANK"] if ON_GPU else "cpu"

torch.set_num_threads(1)
if ON_GPU:
    torch.cuda.set_device(DEVICE)
dist.init_process_group("nccl" if ON_GPU else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
data, other = [torch.zeros(MOST_BYTES // 4, dtype=torch.float32, device=DEVICE) for _ in range(2)]


def all_reduce(count, async_op=False):
    return dist.all_reduce(data[:count], async_op=async_op)


def reduce_scatter(count, async_op=False):
    if not ON_GPU:  # Gloo has none
        return dist.all_reduce(data[:count], async_op=async_op)
    return dist.reduce_scatter_tensor(other[: count // ranks], data[:count], async_op=async_op)


def all_gather(count, async_op=False):
    if not ON_GPU:  # Gloo has the one for lists alone
        return dist.all_gather(list(data[:count].chunk(ranks)), other[: count // ranks], async_op=async_op)
    return dist.all_gather_into_tensor(data[:count], other[: count // ranks], async_op=async_op)


def message(count, async_op=False):
    if async_op:
        return dist.isend(data[:count], 1) if rank == 0 else dist.irecv(data[:count], 0)
    if rank == 0:
        dist.send(data[:count], 1)
        dist.recv(other[:count], 1)
    else:
        dist.recv(data[:count], 0)
        dist.send(other[:count], 0)


OPERATIONS = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather, "message": message}


def wait_for_device():
    if ON_GPU:
        torch.cuda.synchronize()


def each(operation, count, calls):
    times = []
    for _ in range(calls):
        started = time.perf_counter_ns()
        operation(count)
        wait_for_device()
        times.append(time.perf_counter_ns() - started)
    return sorted(times)[calls // 2] / 1e3


def row(operation, count, calls):
    started = time.perf_counter_ns()
    works = [operation(count, async_op=True) for _ in range(calls)]
    for work in works:
        work.wait()
    wait_for_device()
    return (time.perf_counter_ns() - started) / 1e3 / calls


version = "PyTorch %s" % torch.__version__
if ON_GPU:
    version += ", CUDA %s, NCCL %s" % (torch.version.cuda, ".".join(map(str, torch.cuda.nccl.version())))
print(version, flush=True)

for line in sys.stdin:
    name, way, size, calls = line.split()
    operation, count = OPERATIONS[name], int(size) // 4
    operation(count)
    wait_for_device()
    print("%.3f" % (each if way == "each" else row)(operation, count, int(calls)), flush=True)

dist.destroy_process_group()
