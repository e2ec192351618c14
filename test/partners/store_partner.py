"""The other side of store_python_test.rb: PyTorch's own stores doing the same things as ours.

Reads from the command line: client PORT | server PORT | file PATH [LEFT]. Prints one line, "ok", at its end.
With LEFT it keeps the file store open until that file appears.
"""
import datetime
import os
import sys
import time

from torch.distributed import FileStore, PrefixStore, TCPStore

LIMIT = datetime.timedelta(seconds=20)
SOON = datetime.timedelta(milliseconds=200)


def exercise(store, own):
    """Every operation on keys that begin with `own`."""

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
    store.append(key("a"), "12")
    store.append(key("a"), "3")
    assert store.get(key("a")) == b"123"
    store.multi_set([key("m1"), key("m2")], ["1", "22"])
    assert store.multi_get([key("m1"), key("m2")]) == [b"1", b"22"]
    assert store.check([key("k"), key("n")])
    assert not store.check([key("k"), key("never")])
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
    # The connection is as good as before.
    assert store.get(key("n")) == b"-2"


def meet(store):
    """What each side sets, the other waits for."""
    store.set("from_python", "hello")
    assert store.get("from_ruby") == b"hello too"
    assert store.get("ruby/n") == b"-2"


def main():
    role, where = sys.argv[1:3]
    if role == "file":
        store = FileStore(where, 2)
        store.set_timeout(LIMIT)
    else:
        store = TCPStore("127.0.0.1", int(where), 2, role == "server", LIMIT, use_libuv=False)
    exercise(store, "python/")
    exercise(PrefixStore("nested", store), "python/")
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
