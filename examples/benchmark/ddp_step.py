# The peer of ddp_step.rb: the same model, steps and output, in PyTorch.
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SIZES = {"mlp": [784, 1024, 1024, 10], "chain66": [784] + [64] * 65 + [10]}


def build(sizes):
    layers = []
    for i, (a, b) in enumerate(zip(sizes, sizes[1:])):
        layers.append(torch.nn.Linear(a, b))
        if i < len(sizes) - 2:
            layers.append(torch.nn.ReLU())
    return torch.nn.Sequential(*layers)


name = sys.argv[1]
batch, warmup, steps = (int(text) for text in sys.argv[2:5])
world_size = int(os.environ.get("WORLD_SIZE", "1"))
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
if world_size > 1:
    dist.init_process_group("gloo")

torch.manual_seed(1)
model = build(SIZES[name])
if world_size > 1:
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(batch, SIZES[name][0])
targets = torch.randint(0, 10, [batch])
loss_function = torch.nn.CrossEntropyLoss()


def step():
    optimizer.zero_grad()
    loss_function(model(inputs), targets).backward()
    optimizer.step()


for _ in range(warmup):
    step()
if world_size > 1:
    dist.barrier()
times = []
for _ in range(steps):
    started = time.perf_counter()
    step()
    times.append(1000 * (time.perf_counter() - started))
if os.environ.get("RANK", "0") == "0":
    times.sort()
    print(json.dumps({"median": times[len(times) // 2], "mean": sum(times) / len(times),
                      "version": "PyTorch " + torch.__version__}))
if world_size > 1:
    dist.destroy_process_group()
