"""Searches in tests that run `tvmconv tune` as a process."""

import os
import signal
import subprocess
import sys

from processes import GONE_SECONDS, START_SECONDS, abandoned, processes_of, shared_memory, wait_for

from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.workloads import parse

WORKLOAD = "conv2d:1x4x8x8,4x4x1x1,s1,p0"
DEADLINE = 2 * START_SECONDS


class Searches:
    """Processes of `tvmconv tune` with one log, and a folder of their own for temporary files.

    Attributes:
        log: the file.
        folder: for temporary files.
    """

    def __init__(self, path):
        self.log = path / "log.jsonl"
        self.folder = path / "temporary"
        self.folder.mkdir()
        self._shared = shared_memory()
        self._started = []
        if (
            signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        ):  # as in the background of a shell: the searches inherit it
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(self, *words, workload=WORKLOAD, **options):
        """Start a search, which leads a group of processes."""
        words = (workload, "--schedule=tiling", "--tuner=random", "--workers=1", f"--log={self.log}", *words)
        if not any(word.startswith("--device") for word in words):
            words = (*words, "--device=opencl:0")
        process = subprocess.Popen(
            [sys.executable, "-m", "tvmconv", "tune", *words],
            env={**os.environ, "TMPDIR": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        self._started.append(process)
        return process

    def lines(self):
        """The whole lines of the log."""
        return self.log.read_bytes().splitlines(keepends=True) if self.log.exists() else []

    def wait_for_lines(self, n):
        """Wait until the log has so many."""
        wait_for(lambda: len(self.lines()) >= n, DEADLINE)

    def trials(self, workload=WORKLOAD):
        """The trials of a workload, but for that of the schedule `default`; fails if the log has what is no record."""
        return [record for record in self._records(workload) if not record.final]

    def finals(self, workload=WORKLOAD):
        """The last timings of a workload."""
        return [record for record in self._records(workload) if record.final]

    def _records(self, workload):
        if not self.log.exists():
            return []
        bad = InvalidLines()
        records = list(read_records(self.log, bad))
        assert bad.count == 0
        return [record for record in records if record.workload == parse(workload) and record.schedule == "tiling"]

    def nothing_left(self):
        """Whether no process, temporary file or shared memory is left, at the latest after some seconds."""
        wait_for(lambda: not processes_of(self.folder), GONE_SECONDS)
        wait_for(lambda: not [*self.folder.iterdir()], GONE_SECONDS)
        return wait_for(lambda: not abandoned(self._shared), GONE_SECONDS)

    def close(self):
        for process in self._started:
            process.kill()
            process.communicate()


def once(records):
    """Whether no config was measured twice."""
    return len({record.identity for record in records}) == len(records)
