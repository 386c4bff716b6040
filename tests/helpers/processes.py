"""Processes in tests: waiting for what they do, and finding what they left."""

import os
import time
from pathlib import Path

START_SECONDS = 60.0
GONE_SECONDS = 30.0  # for what ends or is removed in a moment, on a machine that does a great deal else
SHARED_MEMORY = Path("/dev/shm")


def wait_for(what, seconds=START_SECONDS):
    """Wait until a function returns something true, and return that."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
    return found


def children(parent=None):
    """Ids of the live processes that a process, by default this one, started itself or by others."""
    started = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            started.setdefault(int(ppid), set()).add(int(path.parent.name))
    found, left = set(), [parent or os.getpid()]
    while left:
        more = started.get(left.pop(), set())
        found |= more
        left += more
    return found


def processes_of(folder):
    """The processes that were started, directly or not, with this folder for temporary files, and are still alive."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={folder}".encode() in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def shared_memory():
    """The files in shared memory, semaphores among them."""
    return set(SHARED_MEMORY.iterdir())


def abandoned(before):
    """The files in shared memory that were not there before and that no live process has mapped.

    Those of others come and go: of tests that run at the same time, say.
    """
    files = {}
    for path in shared_memory() - before:
        try:
            files[path] = str(path.stat().st_ino)
        except OSError:
            continue
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps") if files else ():
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue
        mapped |= {line.split()[4] for line in lines if str(SHARED_MEMORY) in line}  # semaphores by another name
    return {path for path, inode in files.items() if inode not in mapped}
