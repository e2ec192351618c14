# The peer of ddp_step.rb: the same models, steps, orders and answers, in PyTorch.
import gc
import re

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rank import answer_orders, milliseconds

SIZES = {"mlp": [784, 1024, 1024, 10], "chain66": [784] + [64] * 65 + [10], "wide": [784, 4096, 4096, 10]}


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), 1)


def build(name):
    if name == "cnn":
        return Cnn()
    sizes = SIZES[name]
    layers = [nn.Flatten()]
    for i, (a, b) in enumerate(zip(sizes, sizes[1:])):
        layers.append(nn.Linear(a, b))
        layers.append(nn.ReLU() if i < len(sizes) - 2 else nn.LogSoftmax(1))
    return nn.Sequential(*layers)


def make_optimizer(model, order):
    """The optimizer and which form of it: the fused one if this PyTorch has it on the CPU, else foreach."""
    kind, options = {"sgd": (torch.optim.SGD, {"lr": 0.01}), "momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
                     "adam": (torch.optim.Adam, {"lr": 0.001})}[order["optimizer"]]
    if not order.get("fused"):
        return kind(model.parameters(), **options), "default"
    try:
        return kind(model.parameters(), fused=True, **options), "fused=True"
    except (TypeError, RuntimeError):
        return kind(model.parameters(), foreach=True, **options), "foreach=True"


def private_bytes():
    with open("/proc/self/smaps_rollup") as rollup:
        found = re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+)", rollup.read(), re.M)
    return 1024 * sum(int(kilobytes) for kilobytes in found)


def peak_bytes():
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"^VmHWM:\s+(\d+)", status.read(), re.M).group(1))


def step(model, optimizer, inputs, targets, forget=False):
    optimizer.zero_grad(set_to_none=forget)
    F.nll_loss(model(inputs), targets).backward()
    optimizer.step()


def warm_up(order, inputs, targets):
    """The libraries below keep what they once needed: that is not the gradients' memory."""
    net = build(order["model"])
    for _ in range(2):
        step(net, torch.optim.SGD(net.parameters(), lr=0.01), inputs, targets)


def do(order):
    gc.collect()
    torch.manual_seed(1)
    net = build(order["model"])
    inputs = torch.randn(order["batch"], 1, 28, 28)
    targets = torch.randint(0, 10, [order["batch"]])
    if order.get("memory"):
        warm_up(order, inputs, targets)
        gc.collect()
    before = private_bytes()
    model = DistributedDataParallel(net, gradient_as_bucket_view=order.get("view", True)) if order.get("ddp") else net
    optimizer, form = make_optimizer(model, order)

    if order.get("memory"):
        for _ in range(order["steps"]):
            step(model, optimizer, inputs, targets)
        gc.collect()
        return {"gradients": sum(p.numel() * p.element_size() for p in net.parameters()),
                "growth": private_bytes() - before, "peak": peak_bytes()}
    for _ in range(order["warmup"]):
        step(model, optimizer, inputs, targets, order.get("fused", False))
    times = milliseconds(order["steps"], lambda: step(model, optimizer, inputs, targets, order.get("fused", False)))
    return {"mean": sum(times) / len(times), "median": sorted(times)[len(times) // 2], "form": form}


answer_orders(do)
