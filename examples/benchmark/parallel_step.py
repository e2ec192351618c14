# The peer of parallel_step.rb: the same model, steps, orders and answers, in PyTorch (2.4 and newer).
import gc
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rank import answer_orders, milliseconds

WIDTH = 512
SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
             "zero_bubble": "ScheduleInterleavedZeroBubble"}


def pipeline(layers, inputs, target, order):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    per_rank = 1 if order["schedule"] in ("gpipe", "1f1b") else 2 if order["schedule"] == "interleaved" else 1
    count = ranks * per_rank
    each = len(layers) // count
    stages = [pipelining.PipelineStage(nn.Sequential(*layers[i * each:(i + 1) * each]), i, count, torch.device("cpu"))
              for i in range(rank, count, ranks)]
    single = order["schedule"] in ("gpipe", "1f1b")
    schedule = getattr(pipelining, SCHEDULES[order["schedule"]])(
        stages[0] if single else stages, n_microbatches=order["micro_batches"], loss_fn=F.mse_loss)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.001, fused=order["fused"] or None)

    def step():
        optimizer.zero_grad()
        args = [inputs] if rank == 0 else []
        options = {"target": target, "losses": []} if rank == (count - 1) % ranks else {}
        schedule.step(*args, **options)
        optimizer.step()

    return step


def alone(layers, inputs, target, order):
    return train(nn.Sequential(*layers), inputs, target, order)


def tensor(layers, inputs, target, order):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # PyTorch 2.6 also looks for a name's later parts at the top, so they have to be other names.
    plan = {f"{i}.linear": RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(len(layers))}
    return train(parallelize_module(nn.Sequential(*layers), mesh, plan), inputs, target, order)


def train(net, inputs, target, order):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001, fused=order["fused"] or None)

    def step():
        optimizer.zero_grad()
        F.mse_loss(net(inputs), target).backward()
        optimizer.step()

    return step


def do(order):
    gc.collect()
    torch.manual_seed(1)
    layers = [nn.Sequential(OrderedDict(linear=nn.Linear(WIDTH, WIDTH), relu=nn.ReLU())) for _ in range(8)]
    inputs, target = torch.randn(order["batch"], WIDTH), torch.randn(order["batch"], WIDTH)
    step = {"alone": alone, "tensor": tensor}.get(order["schedule"], pipeline)(layers, inputs, target, order)
    for _ in range(order["warmup"]):
        step()
    return {"milliseconds": milliseconds(order["steps"], step)}


answer_orders(do)
