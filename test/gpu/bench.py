"""Operations by libtddp's nccl backend beside PyTorch's own, in one run: two processes of each on one GPU, then on two, then one.

    bench.py --worker build/test/gpu_bench [--torch PYTHON] [--gpus 1] [--device cpu] [--quick] [--seconds 120]

all_reduce; reduce_scatter and all_gather, as fully sharded training has them; and messages, as pipelines have them. Rounds of
the two alternate, so that what else the machine does falls on both; the figures are medians over the rounds of microseconds a
call, as rank 0 has them. "each" waits for every call's result, "row" has all calls of a round under way before it waits.
Without --torch only libtddp is measured. The output is Markdown.

The time is shared among all sizes of all tables: where calls take long, a round has fewer of them, and then there are fewer
rounds.
"""

import argparse
import os
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
SIZES = [8, 64, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 1 << 20, 8 << 20, 64 << 20]
PATIENCE = 60


class Operation:
    def __init__(self, name, title, share, sizes):
        self.name = name
        self.title = title
        self.share = share  # of the time of a world
        self.sizes = sizes


ALL_REDUCE = Operation("all_reduce", "all_reduce (sum, float32)", 0.4, SIZES)
OPERATIONS = [
    ALL_REDUCE,
    Operation("reduce_scatter", "reduce_scatter (sum, float32): the size is that of all parts", 0.2, SIZES[::2]),
    Operation("all_gather", "all_gather: the size is that of all parts", 0.2, SIZES[::2]),
    Operation("message", "send and recv: each is a message and one back, a row goes one way", 0.2, SIZES[::2]),
]


class Stopped(Exception):
    """A process that ended, or did not answer."""


class Rank:
    def __init__(self, command, environment):
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line.strip())
        self.lines.put(None)

    def say(self, line):
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Stopped("a rank does not read any more: %s" % error) from error

    def answer(self):
        try:
            line = self.lines.get(timeout=PATIENCE)
        except queue.Empty:
            raise Stopped("no answer in %d s" % PATIENCE) from None
        if line is None:
            raise Stopped("a rank ended with %s" % self.process.wait())
        return line

    def finish(self):
        try:
            self.process.stdin.close()
        except OSError:
            pass

    def end(self):
        try:
            self.process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


class World:
    """As many ranks of one side. NCCL takes several on one GPU only as ranks of different hosts."""

    def __init__(self, command, ranks, gpus):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = dict(os.environ, WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if gpus == 1:
            shared.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        self.ranks = []
        for rank in range(ranks):
            own = {"NCCL_HOSTID": "rank-%d" % rank} if gpus == 1 else {}
            self.ranks.append(Rank(command, dict(shared, RANK=str(rank), LOCAL_RANK=str(rank % gpus), **own)))
        try:
            self.version = [rank.answer() for rank in self.ranks][0]
        except Stopped:
            self.end()
            raise

    def round(self, line):
        for rank in self.ranks:
            rank.say(line)
        return [float(rank.answer()) for rank in self.ranks][0]

    def end(self):
        # All at once: they need each other until the end.
        for rank in self.ranks:
            rank.finish()
        for rank in self.ranks:
            rank.end()


def most_calls(size):
    return 200 if size < 1 << 16 else 50 if size < 1 << 20 else 20 if size < 32 << 20 else 5


def text_of(size):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return "%d %s" % (size // unit, name)
    return "%d B" % size


# The least that a figure is made of.
LEAST_CALLS = 3
LEAST_ROUNDS = 3


def plan(worlds, operation, size, most_rounds, seconds):
    """How many rounds of how many calls take about so many seconds, by what a few calls take."""
    started = time.monotonic()
    for world in worlds.values():
        for way in ("each", "row"):
            world.round("%s %s %d 1" % (operation.name, way, size))
    # A round makes a call that is not timed first.
    call = (time.monotonic() - started) / 2
    calls = int(seconds / call / most_rounds) - 1
    if calls >= LEAST_CALLS:
        return most_rounds, min(calls, most_calls(size))
    return min(most_rounds, max(LEAST_ROUNDS, int(seconds / call / (LEAST_CALLS + 1)))), LEAST_CALLS


def measure(worlds, operation, options, deadline):
    sides = list(worlds)
    print("\n%s\n" % operation.title)
    print("| size | %s | rounds of calls |" % " | ".join("%s, %s" % (side, way) for way in ("each", "row") for side in sides))
    print("| ---: |%s ---: |" % (" ---: |" * 2 * len(sides)))
    sizes = operation.sizes[::3] if options.quick else operation.sizes
    for world in worlds.values():  # the first call connects the ranks
        world.round("%s each %d 1" % (operation.name, sizes[0]))
    for position, size in enumerate(sizes):
        left = deadline - time.monotonic()
        if left <= 0:
            print("\nOut of time before %s: larger sizes were not measured." % text_of(size))
            return
        rounds, calls = plan(worlds, operation, size, options.rounds, left / (len(sizes) - position))
        figures = {(side, way): [] for way in ("each", "row") for side in sides}
        for number in range(rounds):
            for way in ("each", "row"):
                # Whoever is first finds the machine as the last round left it.
                for side in sides if number % 2 == 0 else sides[::-1]:
                    figures[side, way].append(worlds[side].round("%s %s %d %d" % (operation.name, way, size, calls)))
        medians = ["%.1f" % statistics.median(figures[side, way]) for way in ("each", "row") for side in sides]
        print("| %s | %s | %d × %d |" % (text_of(size), " | ".join(medians), rounds, calls), flush=True)


def compare(commands, ranks, gpus, operations, options, seconds):
    """Whether both sides could be measured."""
    worlds = {}
    passed = True
    where = "%d rank%s on %s" % (ranks, "" if ranks == 1 else "s", "one GPU" if gpus == 1 else "%d GPUs" % gpus)
    try:
        for side, command in commands.items():
            try:
                worlds[side] = World(command, ranks, gpus)
            except Stopped as stopped:
                passed = False
                print("\n%s with %s did not start: %s" % (side, where, stopped))
        if worlds:
            print("\n**%s**: %s" % (where, "; ".join(world.version for world in worlds.values())))
            deadline = time.monotonic()
            shares = sum(operation.share for operation in operations)
            for operation in operations:
                # What one has left is the next one's.
                deadline += seconds * operation.share / shares
                measure(worlds, operation, options, deadline)
    except Stopped as stopped:
        passed = False
        print("\n%s: stopped: %s" % (where, stopped))
    finally:
        for world in worlds.values():
            world.end()
    return passed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", required=True, help="the program gpu_bench")
    parser.add_argument("--torch", help="a Python that has torch")
    parser.add_argument("--gpus", type=int, default=1, help="how many there are; two are used at most")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: PyTorch's side over Gloo")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--seconds", type=float, default=120,
                        help="for all, beside what starting takes; no new size is begun after so long")
    options = parser.parse_args()
    commands = {"libtddp": [options.worker]}
    if options.torch:
        commands["PyTorch"] = [options.torch, os.path.join(HERE, "bench_torch.py")]
    os.environ["TDDP_BENCH_DEVICE"] = options.device
    print("Microseconds a call, medians of the rounds.")
    # One rank has nobody to send to: it shows what a call costs on the host.
    worlds = [(2, 1, OPERATIONS, 6), (1, 1, [ALL_REDUCE], 1)]
    if options.gpus > 1:
        worlds.insert(1, (2, 2, OPERATIONS, 2))
    parts = sum(part for *_, part in worlds)
    passed = [compare(commands, ranks, gpus, operations, options, options.seconds * part / parts)
              for ranks, gpus, operations, part in worlds]
    return 0 if all(passed) else 1


sys.exit(main())
