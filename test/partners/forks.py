"""Runs scripts in forks of a process that has loaded PyTorch, which takes a second or more.

forks.py DESCRIPTOR: a socket of packets, whose other end is Partner::Forks. Each packet is a script and its arguments as
a list in JSON, and brings two descriptors: the script's standard output and error, and where its process id and at its
end its status are written, a line each. Ends when the other end is closed.
"""
import contextlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback

import torch.distributed  # noqa: F401


def play(arguments, output):
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = arguments
    status = 1
    try:
        runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def watch(arguments, output, report):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.close(report)
        play(arguments, output)
    os.close(output)
    os.write(report, f"{child}\n".encode())
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # who ended it does not wait for this
        os.write(report, f"{status}\n".encode())
    os._exit(0)


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.setblocking(True)  # Ruby's are not
    while True:
        packet, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 2)
        if not packet:
            return
        if os.fork() == 0:
            connection.close()
            watch(json.loads(packet), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


main()
