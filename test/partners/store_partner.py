"""The other side of store_python_test.rb: PyTorch's own stores doing the same things as ours.

Reads from the command line: client PORT | server PORT | pair PORT RANK [host] | host PORT | file PATH [LEFT].
Prints one line, "ok", at its end. With LEFT it keeps the file store open until that file appears. A pair is two of
these on one server of ours, or one of these that hosts the store and one of ours; a host serves until it is killed.
"""
import datetime
import os
import sys
import time

from torch.distributed import FileStore, PrefixStore, TCPStore

LIMIT = datetime.timedelta(seconds=20)
SOON = datetime.timedelta(milliseconds=200)
# PyTorch 1.13 has fewer operations, and another dialect for them.
OLD = not hasattr(TCPStore, "append")
NEWEST = hasattr(TCPStore, "queue_push")


def exercise(store, own, by):
    """Every operation on keys that begin with `own`, on a store kept by "ours", "theirs" or a "file"."""

    def key(name):
        return own + name

    store.set(key("k"), "v")
    assert store.get(key("k")) == b"v"
    store.set(key("empty"), "")
    assert store.get(key("empty")) == b""
    assert [store.add(key("n"), 5), store.add(key("n"), -7)] == [5, -2]
    assert store.get(key("n")) == b"-2"
    assert store.compare_set(key("c"), "", "x") == b"x"
    assert store.compare_set(key("c"), "wrong", "y") == b"x"
    assert store.compare_set(key("absent"), "old", "new") == b"old"
    assert store.compare_set(key("c"), "x", "y") == b"y"
    assert store.num_keys() >= 4
    if OLD:
        store.set(key("m1"), "1")
    else:
        newer(store, key)
    if NEWEST and by == "ours":
        newest(store, key)
    assert store.delete_key(key("k"))
    big = bytes(range(256)) * (1 << 12)
    store.set(key("big"), big)
    assert store.get(key("big")) == big
    store.wait([key("m1"), key("c")])
    try:
        store.wait([key("never")], SOON)
        raise AssertionError("the wait ended without its key")
    except RuntimeError as error:
        assert "timeout" in str(error).lower(), error
    # The connection is as good as before, also when what was waited for comes.
    assert store.get(key("n")) == b"-2"
    if by != "theirs" or not OLD:
        # On its own server PyTorch 1.13 takes the answer of the wait for another's.
        store.set(key("never"), "here after all")
        assert store.get(key("never")) == b"here after all"
    assert store.add(key("n"), 1) == -1
    assert store.add(key("n"), -1) == -2


def newer(store, key):
    """What PyTorch 1.13 does not have."""
    store.append(key("a"), "12")
    store.append(key("a"), "3")
    assert store.get(key("a")) == b"123"
    store.multi_set([key("m1"), key("m2")], ["1", "22"])
    assert store.multi_get([key("m1"), key("m2")]) == [b"1", b"22"]
    assert store.check([key("k"), key("n")])
    assert not store.check([key("k"), key("never")])


def newest(store, key):
    """What PyTorch's servers have only where they are built with libuv, or lately."""
    try:
        store.queue_push(key("q"), "1")
        store.queue_push(key("q"), "2")
        assert store.queue_len(key("q")) == 2
        assert [store.queue_pop(key("q")), store.queue_pop(key("q"), False)] == [b"1", b"2"]
    except NotImplementedError:
        # PyTorch 2.14's client refuses them itself, unless it is built with libuv.
        assert isinstance(store, PrefixStore) or not store.libuvBackend
    assert key("n") in store.list_keys()
    store.barrier(key("b"), 1)


def open_tcp(port, hosts, alone):
    options = {} if OLD else {"use_libuv": False}
    return TCPStore("127.0.0.1", int(port), 1 if alone else 2, hosts, LIMIT, **options)


def play(store, rank, by):
    """One of two: each round one side sets, adds or compares, and the other waits for it."""
    exercise(store, f"pair{rank}/", by)
    for turn in range(50):
        mine, theirs = f"{turn}/{rank}", f"{turn}/{1 - rank}"
        if (turn + rank) % 2 == 0:
            time.sleep(0.002)
            if turn % 3 == 0 or (turn % 3 == 2 and by == "theirs"):
                # compare_set wakes nobody on a server of PyTorch without libuv.
                store.set(mine, str(turn))
            elif turn % 3 == 1:
                assert store.add(mine, turn) == turn
            else:
                assert store.compare_set(mine, "", str(turn)) == str(turn).encode()
            assert store.get(theirs) == b"heard"
        else:
            store.wait([theirs])
            assert store.get(theirs) == str(turn).encode()
            store.set(mine, "heard")
    store.add("sum", rank + 1)
    store.set(f"done{rank}", "")
    store.wait(["done0", "done1"], LIMIT)
    assert store.get("sum") == b"3"
    if by == "theirs":
        store.wait([f"left{1 - rank}"], LIMIT)


def meet(store):
    """What each side sets, the other waits for."""
    store.set("from_python", "hello")
    assert store.get("from_ruby") == b"hello too"
    assert store.get("ruby/n") == b"-2"


def main():
    role, where = sys.argv[1:3]
    hosts = role in ("server", "host") or sys.argv[4:] == ["host"]
    by = "theirs" if hosts else "file" if role == "file" else "ours"
    if role == "file":
        store = FileStore(where, 2)
        store.set_timeout(LIMIT)
    else:
        store = open_tcp(where, hosts, role == "host")
    if role == "host":
        print("ok", flush=True)
        time.sleep(3 * LIMIT.total_seconds())
        return
    if role == "pair":
        play(store, int(sys.argv[3]), by)
        print("ok")
        return
    exercise(store, "python/", by)
    exercise(PrefixStore("nested", store), "python/", by)
    meet(store)
    store.set("python_is_done", "1")
    store.wait(["ruby_is_done"], LIMIT)
    for left in sys.argv[3:]:
        stop = time.monotonic() + LIMIT.total_seconds()
        while not os.path.exists(left):
            assert time.monotonic() < stop, "the other side did not leave"
            time.sleep(0.01)
    del store
    print("ok")


main()
