"""all_reduce by libtddp's nccl backend beside PyTorch's own, in one run: two processes of each on one GPU, then one.

    bench.py --worker build/test/gpu_all_reduce [--torch PYTHON] [--device cpu] [--quick] [--seconds 120]

Rounds of the two alternate, so that what else the machine does falls on both; the figures are medians over the rounds
of microseconds a call, as rank 0 has them. "each" waits for every call's result, "row" has all calls of a round under way
before it waits. Without --torch only libtddp is measured. The output is Markdown.

The time is shared among all sizes of both tables: where calls take long, a round has fewer of them, and then there are
fewer rounds.
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
    """As many ranks of one side, on one GPU: NCCL takes them only as ranks of different hosts."""

    def __init__(self, command, ranks):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = dict(os.environ, WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        self.ranks = [Rank(command, dict(shared, RANK=str(rank), LOCAL_RANK="0", NCCL_HOSTID="rank-%d" % rank))
                      for rank in range(ranks)]
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


def plan(worlds, size, most_rounds, seconds):
    """How many rounds of how many calls take about so many seconds, by what a few calls take."""
    started = time.monotonic()
    for world in worlds.values():
        for way in ("each", "row"):
            world.round("%s %d 1" % (way, size))
    # A round makes a call that is not timed first.
    call = (time.monotonic() - started) / 2
    calls = int(seconds / call / most_rounds) - 1
    if calls >= LEAST_CALLS:
        return most_rounds, min(calls, most_calls(size))
    return min(most_rounds, max(LEAST_ROUNDS, int(seconds / call / (LEAST_CALLS + 1)))), LEAST_CALLS


def measure(worlds, ranks, options, deadline):
    sides = list(worlds)
    if not sides:
        return
    print("\n%d rank%s: %s\n" % (ranks, "" if ranks == 1 else "s", "; ".join(worlds[side].version for side in sides)))
    print("| size | %s | rounds of calls |" % " | ".join("%s, %s" % (side, way) for way in ("each", "row") for side in sides))
    print("| ---: |%s ---: |" % (" ---: |" * 2 * len(sides)))
    sizes = SIZES[::3] if options.quick else SIZES
    for world in worlds.values():  # the first call connects the ranks
        world.round("each %d 1" % sizes[0])
    for position, size in enumerate(sizes):
        left = deadline - time.monotonic()
        if left <= 0:
            print("\nOut of time before %s: larger sizes were not measured." % text_of(size))
            return
        rounds, calls = plan(worlds, size, options.rounds, left / (len(sizes) - position))
        figures = {(side, way): [] for way in ("each", "row") for side in sides}
        for number in range(rounds):
            for way in ("each", "row"):
                # Whoever is first finds the machine as the last round left it.
                for side in sides if number % 2 == 0 else sides[::-1]:
                    figures[side, way].append(worlds[side].round("%s %d %d" % (way, size, calls)))
        medians = ["%.1f" % statistics.median(figures[side, way]) for way in ("each", "row") for side in sides]
        print("| %s | %s | %d × %d |" % (text_of(size), " | ".join(medians), rounds, calls), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", required=True, help="the program gpu_all_reduce")
    parser.add_argument("--torch", help="a Python that has torch")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: PyTorch's side over Gloo")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--seconds", type=float, default=120, help="for all, beside what starting takes; no new size is begun after so long")
    options = parser.parse_args()
    commands = {"libtddp": [options.worker]}
    if options.torch:
        commands["PyTorch"] = [options.torch, os.path.join(HERE, "torch_all_reduce.py")]
    os.environ["TDDP_BENCH_DEVICE"] = options.device
    failed = False
    print("Microseconds a call of all_reduce (sum, float32), medians of the rounds.")
    # Calls of two ranks take longer.
    for ranks, share in ((2, 0.75), (1, 0.25)):
        worlds = {}
        try:
            for side, command in commands.items():
                try:
                    worlds[side] = World(command, ranks)
                except Stopped as stopped:
                    failed = True
                    print("\n%s with %d ranks did not start: %s" % (side, ranks, stopped))
            measure(worlds, ranks, options, time.monotonic() + share * options.seconds)
        except Stopped as stopped:
            failed = True
            print("\n%d ranks: stopped: %s" % (ranks, stopped))
        finally:
            for world in worlds.values():
                world.end()
    return 1 if failed else 0


sys.exit(main())
