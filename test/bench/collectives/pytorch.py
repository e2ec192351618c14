"""PyTorch's Gloo as a partner of the collectives benchmark: what measure.c is for those in C."""

import array
import json
import math
import mmap
import os
import signal
import sys
import time

os.environ.setdefault("USE_LIBUV", "0")

import torch
import torch.distributed as dist

LINE, HEAD, MOST = 64, 64 * 64, 4096  # meeting.h
LOOP, LOOP_BYTES, LEAST = 32, 16384, 3
PERIOD = 13
IN_PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")

rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
folder = os.environ["BENCH_FOLDER"]
limit = int(os.environ["BENCH_LIMIT"])


class Meeting:
    """meeting.c in Python: bytes in a file that all ranks map."""

    def __init__(self):
        with open(os.path.join(folder, "meeting"), "r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)
        self.times = memoryview(self.map)[HEAD:].cast("d")
        self.now = 0

    def come(self):
        self.now = (self.now + 1) % 256
        both = (self.now, (self.now + 1) % 256)
        self.map[rank * LINE] = self.now
        for other in range(ranks):
            spins = 0
            while self.map[other * LINE] not in both:
                spins += 1
                if spins > 200:
                    os.sched_yield()

    def begin(self):
        self.come()
        if rank == 0:
            self.map[2] = 0
        self.come()

    def ends(self, i, over):
        last = self.map[2]
        if rank == 0 and over and last == 0:
            self.map[2] = (i + 1) % 255 + 1
        return last == i % 255 + 1

    def count(self, say):
        self.map[rank * LINE + 1] = say
        self.come()
        total = sum(self.map[other * LINE + 1] for other in range(ranks))
        self.come()
        return total

    def worst(self, mine):
        self.times[rank * MOST : rank * MOST + len(mine)] = array.array("d", mine)
        self.come()
        columns = [self.times[r * MOST : r * MOST + len(mine)].tolist() for r in range(ranks)]
        self.come()
        return [max(row) for row in zip(*columns)]


class Call:
    def __init__(self, operation, dtype, count):
        self.operation = operation
        size = torch.empty(0, dtype=dtype).element_size()
        self.part = count
        if operation in IN_PARTS:
            self.part = max(count // ranks, 1)
            count = self.part * ranks
        self.count, self.bytes, self.dtype = count, count * size, dtype
        self.input = torch.zeros(count, dtype=dtype)
        self.output = torch.zeros(count, dtype=dtype)
        self.ins = list(self.input.split(self.part))
        self.outs = list(self.output.split(self.part))
        self.run = getattr(self, operation)

    def all_reduce(self):
        dist.all_reduce(self.input)

    def broadcast(self):
        dist.broadcast(self.input, 0)

    def reduce(self):
        dist.reduce(self.input, 0)

    def all_gather(self):
        dist.all_gather(self.outs, self.ins[0])

    def all_to_all(self):
        dist.all_to_all_single(self.output, self.input)

    def gather(self):
        dist.gather(self.ins[0], self.outs if rank == 0 else None, dst=0)

    def scatter(self):
        dist.scatter(self.outs[0], self.ins if rank == 0 else None, src=0)

    def reduce_scatter(self):
        dist.reduce_scatter(self.outs[0], self.ins)

    def barrier(self):
        dist.barrier()

    def ping_pong(self):
        if rank == 0:
            dist.send(self.input, 1)
            dist.recv(self.output, 1)
        elif rank == 1:
            dist.recv(self.output, 0)
            dist.send(self.output, 0)

    def values(self, who, first, count):
        places = (torch.arange(first, first + count) % PERIOD) * 7
        owners = range(ranks) if who is None else [who]
        return sum((places + r * 3) % PERIOD for r in owners).to(self.dtype)

    def holds(self):
        """Runs once with values, and says whether the result is right."""
        self.input.copy_(self.values(rank, 0, self.count))
        self.run()
        name, whole, mine = self.operation, self.count, rank * self.part
        if name == "all_reduce" or (name == "reduce" and rank == 0):
            expected, got = self.values(None, 0, whole), self.input
        elif name == "broadcast":
            expected, got = self.values(0, 0, whole), self.input
        elif name == "reduce_scatter":
            expected, got = self.values(None, mine, self.part), self.outs[0]
        elif name == "scatter":
            expected, got = self.values(0, mine, self.part), self.outs[0]
        elif name == "ping_pong" and rank < 2:
            expected, got = self.values(0, 0, whole), self.output
        elif name in ("all_gather", "all_to_all") or (name == "gather" and rank == 0):
            first = mine if name == "all_to_all" else 0
            expected, got = torch.cat([self.values(r, first, self.part) for r in range(ranks)]), self.output
        else:
            expected = got = torch.zeros(0)
        right = torch.equal(expected, got)
        self.input.zero_()
        self.output.zero_()
        return right


def middle(values, part):
    return sorted(values)[int((len(values) - 1) * part + 0.5)]


def series(most, limit_us, one):
    """Times of calls, until rank 0's time is over."""
    mine = []
    until = time.perf_counter_ns() + limit_us * 1000
    meeting.begin()
    last = False
    while not last and len(mine) < most:
        mine.append(one())
        last = meeting.ends(len(mine) - 1, len(mine) + 1 >= LEAST and time.perf_counter_ns() > until)
    return meeting.worst(mine)


def timed(call, iterations, limit_us, fresh):
    clock = time.perf_counter_ns

    def one():
        if fresh:
            call.input.zero_()
        meeting.come()
        started = clock()
        call.run()
        took = (clock() - started) / 1000
        return took if call.operation != "ping_pong" else took / 2 if rank == 0 else 0

    def loop():
        meeting.come()
        started = clock()
        for _ in range(LOOP):
            call.run()
        return (clock() - started) / 1000 / LOOP

    worst = series(iterations, limit_us / 2, one)
    answer = {"iterations": len(worst), "median": middle(worst, 0.5), "p10": middle(worst, 0.1), "p90": middle(worst, 0.9),
              "p99": middle(worst, 0.99), "min": min(worst), "mean": math.fsum(worst) / len(worst)}
    if call.operation in SYMMETRIC and call.bytes <= LOOP_BYTES:
        answer["loop"] = middle(series(iterations, limit_us / 2, loop), 0.5)
    return answer


def measure(line):
    operation, dtype, size, iterations, limit_us, _, input_state, check = line.split()
    dtype = getattr(torch, dtype)
    call = Call(operation, dtype, max(int(size) // torch.empty(0, dtype=dtype).element_size(), 1))
    try:
        wrong = meeting.count(0 if check != "check" else 0 if call.holds() else 1)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        # What this version does not do; it says so on all ranks before anything is sent.
        return {"skip": str(error).splitlines()[0][:120]}
    call.run()
    answer = timed(call, int(iterations), float(limit_us), input_state == "fresh")
    wrong += meeting.count(0 if check != "check" else 0 if call.holds() else 1)
    size = 0 if operation == "barrier" else call.bytes
    return {"bytes": size, "checked": check == "check", "wrong": wrong, **answer}


signal.alarm(limit)  # opening waits for ever if the driver is gone
torch.set_num_threads(1)
meeting = Meeting()
dist.init_process_group("gloo", init_method="file://" + os.path.join(folder, "store"), rank=rank, world_size=ranks)
if int(os.environ["BENCH_BIND"]):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # this thread; others of the process stay free
answers = open(os.path.join(folder, "answers"), "w") if rank == 0 else None
if answers:
    print(json.dumps({"version": "PyTorch " + torch.__version__}), file=answers, flush=True)
with open(os.path.join(folder, "requests.%d" % rank)) as requests:
    signal.alarm(0)
    for line in iter(requests.readline, ""):
        signal.alarm(limit)
        answer = measure(line)
        if answers:
            print(json.dumps(answer), file=answers, flush=True)
        signal.alarm(0)
sys.stdout.flush()
dist.destroy_process_group()
