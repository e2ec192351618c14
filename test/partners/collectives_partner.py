"""The other side of collectives_python_test.rb: PyTorch's own gloo doing the same operations on the same values.

Reads from the command line: WORLD_SIZE FILE, where FILE is a path for the ranks to meet. Prints one line of JSON: for
each rank a map from the row's name to its values, or to the text of the error with which PyTorch refused it.
"""
import datetime
import json
import os
import sys
import warnings

import torch
import torch.distributed as dist

DTYPES = ["uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64", "complex64"]
WHOLE = ["uint8", "int8", "int16", "int32", "int64"]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
SHAPES = [[0], [], [1], [3, 5], [2, 1, 129]]
LIMIT = datetime.timedelta(seconds=30)


def values(rank, count, dtype, salt=0):
    """Small numbers, so that each dtype holds every result exactly; those of floats have signs and fractions."""
    numbers = [(rank * 5 + i * 3 + salt) % 5 + 1 for i in range(count)]
    if dtype == "bool":
        return [number % 2 for number in numbers]
    return numbers if dtype in WHOLE else [(number - 3) * 0.25 for number in numbers]


def tensor(rank, shape, dtype, salt=0):
    count = 1
    for size in shape:
        count *= size
    return torch.tensor(values(rank, count, dtype, salt), dtype=torch.float64).to(getattr(torch, dtype)).reshape(shape)


def empty(shape, dtype):
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def plain(each):
    each = each.real if each.is_complex() else each
    return each.to(torch.float64).flatten().tolist()


def reductions(rank, size):
    for op in OPS:
        for dtype in DTYPES:
            kind = getattr(dist.ReduceOp, op, None)

            def all_reduce(shape):
                mine = tensor(rank, shape, dtype)
                dist.all_reduce(mine, op=kind)
                return [mine]

            def reduce():
                mine = tensor(rank, [7], dtype)
                dist.reduce(mine, dst=1, op=kind)
                # What the others hold afterwards is nobody's business.
                return [mine] if rank == 1 else []

            def reduce_scatter_tensor():
                mine = empty([2, 3], dtype)
                dist.reduce_scatter_tensor(mine, tensor(rank, [2 * size, 3], dtype), op=kind)
                return [mine]

            def reduce_scatter():
                mine = empty([5], dtype)
                dist.reduce_scatter(mine, [tensor(rank, [5], dtype, other) for other in range(size)], op=kind)
                return [mine]

            for shape in SHAPES:
                yield f"all_reduce {op} {dtype} {shape}", lambda: all_reduce(shape)
            yield f"reduce {op} {dtype}", reduce
            yield f"reduce_scatter_tensor {op} {dtype}", reduce_scatter_tensor
            yield f"reduce_scatter {op} {dtype}", reduce_scatter


def moves(rank, size):
    for dtype in DTYPES:

        def broadcast():
            mine = tensor(rank, [3, 5], dtype)
            dist.broadcast(mine, src=size - 1)
            return [mine]

        def all_gather():
            lists = [empty([2, 3], dtype) for _ in range(size)]
            dist.all_gather(lists, tensor(rank, [2, 3], dtype))
            return lists

        def all_gather_into_tensor():
            mine = empty([2 * size, 3], dtype)
            dist.all_gather_into_tensor(mine, tensor(rank, [2, 3], dtype))
            return [mine]

        def gather():
            lists = [empty([4], dtype) for _ in range(size)] if rank == 1 else None
            dist.gather(tensor(rank, [4], dtype), lists, dst=1)
            return lists or []

        def scatter():
            mine = empty([4], dtype)
            lists = [tensor(rank, [4], dtype, other) for other in range(size)] if rank == size - 1 else None
            dist.scatter(mine, lists, src=size - 1)
            return [mine]

        def all_to_all_single():
            mine = empty([size, 3], dtype)
            dist.all_to_all_single(mine, tensor(rank, [size, 3], dtype))
            return [mine]

        def all_to_all_single_uneven():
            # Rank r gives r + other to each other; some give nothing.
            gives = [rank * other for other in range(size)]
            mine = empty([sum(gives), 2], dtype)
            dist.all_to_all_single(mine, tensor(rank, [sum(gives), 2], dtype), gives, gives)
            return [mine]

        def all_to_all():
            lists = [empty([3], dtype) for _ in range(size)]
            dist.all_to_all(lists, [tensor(rank, [3], dtype, other) for other in range(size)])
            return lists

        def ring():
            mine = empty([3], dtype)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, tensor(rank, [3], dtype), (rank + 1) % size),
                    dist.P2POp(dist.irecv, mine, (rank - 1) % size),
                ]
            )
            for work in works:
                work.wait()
            return [mine]

        def any_source():
            mine = tensor(rank, [3], dtype)
            if rank != 1:
                if rank == 0:
                    dist.send(mine, 1, tag=5)
                return []
            assert dist.recv(mine, tag=5) == 0
            return [mine]

        for move in (broadcast, all_gather, all_gather_into_tensor, gather, scatter, all_to_all_single,
                     all_to_all_single_uneven, all_to_all, ring, any_source):
            yield f"{move.__name__} {dtype}", move


def others(rank, size):
    def all_gather_object():
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank * 100})
        return objects

    def gather_object():
        objects = [None] * size if rank == 1 else None
        dist.gather_object([rank, None, 0.5], objects, dst=1)
        return objects

    def broadcast_object_list():
        objects = [rank, "é" * 10, {"a": [rank]}] if rank == 2 else [None, None, None]
        dist.broadcast_object_list(objects, src=2)
        return objects

    def scatter_object_list():
        objects = [None]
        dist.scatter_object_list(objects, [{"for": other} for other in range(size)] if rank == 0 else [None] * size, src=0)
        return objects

    def all_reduce_coalesced():
        tensors = [tensor(rank, shape, "float32") for shape in ([3], [2, 2])]
        dist.all_reduce_coalesced(tensors)
        return [plain(each) for each in tensors]

    def some_of_the_ranks():
        group = dist.new_group([size - 1, 0])
        if dist.get_rank(group) < 0:
            return []
        mine = tensor(rank, [3], "float32")
        dist.broadcast(mine, src=size - 1, group=group)
        return [dist.get_rank(group), dist.get_world_size(group), plain(mine)]

    for other in (all_gather_object, gather_object, broadcast_object_list, scatter_object_list, all_reduce_coalesced,
                  some_of_the_ranks):
        yield other.__name__, other


def outcome(row, of):
    try:
        return {"values": of(row())}
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return {"refused": str(error).splitlines()[0] if str(error) else type(error).__name__}


def run(rank, size, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=LIMIT)
    said = {}
    for rows in (reductions(rank, size), moves(rank, size)):
        for name, row in rows:
            said[name] = outcome(row, lambda tensors: [plain(each) for each in tensors])
    for name, row in others(rank, size):
        said[name] = outcome(row, lambda objects: objects)
    dist.barrier()
    return said


def main():
    warnings.filterwarnings("ignore")
    size, path = int(sys.argv[1]), sys.argv[2]
    # PyTorch 1.13 cannot be asked.
    if not dist.is_available() or not getattr(dist, "is_gloo_available", lambda: True)():
        print(json.dumps("this PyTorch has no gloo"))
        return
    torch.set_num_threads(1)
    pipes = []
    waiting, go = os.pipe()
    for rank in range(size):
        reading, writing = os.pipe()
        if os.fork() == 0:
            status = 1
            os.close(go)
            try:
                with os.fdopen(writing, "w") as out:
                    json.dump(run(rank, size, path), out)
                # Not destroy_process_group, which in 2.6 can wait with the GIL for a thread that wants it. Whoever
                # ends closes its connections: that must not be before all are through.
                os.read(waiting, 1)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(writing)
        pipes.append(reading)
    said = []
    for reading in pipes:
        with os.fdopen(reading) as results:
            said.append(results.read())
    os.close(go)
    for _ in pipes:
        os.wait()
    if "" in said:
        sys.exit("a rank ended early")
    print(json.dumps([json.loads(each) for each in said]))


main()
