"""Processes of Python in which TVM is loaded: a server forks one for each call, as to load TVM takes a second of each.

Matplotlib is loaded as well, as it looks for fonts in each new home; tvmconv is not, as callers may change it.

    python forked_python.py serve SOCKET    # until its standard input ends
    python -S forked_python.py call SOCKET ARGUMENT...    # as `python ARGUMENT...`: -c CODE, -m MODULE, or a file

A forked process has the caller's arguments, folder, environment and files, and the caller ends with its exit status.
"""

import array
import contextlib
import gc
import json
import os
import runpy
import select
import socket
import sys
from pathlib import Path

STUB_FOLDER = str(Path(__file__).parents[2] / "tvmconv/tvm_import")  # TVM loads without PyTorch when it is on the path


def call(path, arguments):
    """Have the server run a command, and return its exit status."""
    request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
        connection.sendmsg([len(request).to_bytes(4, "little")], files)
        connection.sendall(request)
        return int.from_bytes(connection.recv(1), "little")


def serve(path):
    """Fork a process for each call, and return in it with the command's arguments; None when the server ends."""
    sys.path.insert(0, STUB_FOLDER)
    import matplotlib.pyplot as plt  # noqa: F401
    import tvm  # noqa: F401

    sys.path.remove(STUB_FOLDER)
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([listener, 0], [], [])
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if listener not in readable:
                return None
            connection, _ = listener.accept()
            with connection:
                if os.fork():
                    continue
                listener.close()
                size, files, _, _ = socket.recv_fds(connection, 4, 3)
                request = connection.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
                if child := os.fork():
                    _, status = os.waitpid(child, 0)
                    status = os.waitstatus_to_exitcode(status)
                    connection.sendall((status if status >= 0 else 128 - status).to_bytes(1, "little"))
                    os._exit(0)
            return become(*json.loads(request), files)


def become(arguments, folder, environment, files):
    """Give this process what a call has, and return its arguments."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    return arguments


def run(arguments):
    """Do as `python ARGUMENT...` does."""
    first, *others = arguments
    if first == "-c":
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *others[1:]]
        exec(compile(others[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv[:] = arguments
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _, mode, socket_path, *words = sys.argv
    if mode == "call":
        sys.exit(call(socket_path, words))
    sys.path.pop(0)  # this file's folder
    command = serve(socket_path)
    if command:
        run(command)
