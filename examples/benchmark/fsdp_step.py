# The peer of fsdp_step.rb: the same models, steps, orders and answers, in PyTorch. Its fully_shard where that runs on
# CPUs (2.7 and newer), else FullyShardedDataParallel (2.1 and newer), else DistributedDataParallel alone.
import gc
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rank import answer_orders, milliseconds

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


class Layers(nn.Module):
    WIDTH = 512

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(nn.Sequential(nn.Linear(self.WIDTH, self.WIDTH), nn.ReLU()) for _ in range(8))

    def forward(self, x):
        for unit in self.units:
            x = unit(x)
        return x

    def batch(self, size):
        return torch.randn(size, self.WIDTH), torch.randn(size, self.WIDTH)

    def loss(self, output, target):
        return F.mse_loss(output, target)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.width, self.heads = width, heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, qkv, mask):
        rows, length, _ = qkv.shape
        q, k, v = (part.reshape(rows, length, self.heads, self.width // self.heads).transpose(1, 2)
                   for part in qkv.split(self.width, dim=2))
        scores = q.matmul(k.transpose(-2, -1)) / math.sqrt(self.width // self.heads) + mask
        return F.softmax(scores, dim=-1).matmul(v).transpose(1, 2).reshape(rows, length, self.width)

    def forward(self, x, mask):
        x = x + self.proj(self.attention(self.qkv(self.ln1(x)), mask))
        return x + self.down(F.relu(self.up(self.ln2(x))))


class Gpt(nn.Module):
    VOCABULARY, WIDTH, LENGTH = 256, 384, 128

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(self.VOCABULARY, self.WIDTH), nn.Embedding(self.LENGTH, self.WIDTH)
        self.units = nn.ModuleList(Block(self.WIDTH, 6) for _ in range(6))
        self.norm = nn.LayerNorm(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY, bias=False)
        self.positions = torch.arange(0, self.LENGTH)
        self.mask = torch.triu(torch.ones(self.LENGTH, self.LENGTH), 1) * -1e9

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(self.positions)
        for unit in self.units:
            x = unit(x, self.mask)
        return self.head(self.norm(x))

    def batch(self, size):
        return tuple(torch.randint(0, self.VOCABULARY, (size, self.LENGTH)) for _ in range(2))

    def loss(self, output, target):
        return F.cross_entropy(output.view(-1, self.VOCABULARY), target.view(-1))


def shard(net, how):
    if VERSION >= (2, 7):
        from torch.distributed.fsdp import fully_shard
        for unit in net.units:
            fully_shard(unit, reshard_after_forward=how == "full_shard")
        fully_shard(net)
        return net, "fully_shard"
    if VERSION >= (2, 1):
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        strategy = ShardingStrategy.FULL_SHARD if how == "full_shard" else ShardingStrategy.SHARD_GRAD_OP
        policy = ModuleWrapPolicy({type(net.units[0])})
        return FullyShardedDataParallel(net, sharding_strategy=strategy, auto_wrap_policy=policy, use_orig_params=True,
                                        device_id=torch.device("cpu")), "FullyShardedDataParallel"
    return None, "none"


def do(order):
    gc.collect()
    torch.manual_seed(1)
    net = {"layers": Layers, "gpt": Gpt}[order["model"]]()
    inputs, target = net.batch(order["batch"])
    loss, form = net.loss, "alone"
    model = net
    if order["how"] == "ddp":
        model, form = DistributedDataParallel(net, gradient_as_bucket_view=True), "DistributedDataParallel"
    elif order["how"] != "alone":
        model, form = shard(net, order["how"])
    if model is None:
        return {"form": form}
    options = {"fused": True} if order["fused"] and VERSION >= (2, 4) else {"foreach": True} if order["fused"] else {}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, **options)

    def step():
        optimizer.zero_grad()
        loss(model(inputs), target).backward()
        optimizer.step()

    for _ in range(order["warmup"]):
        step()
    return {"milliseconds": milliseconds(order["steps"], step), "form": form}


answer_orders(do)
