import queue
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest

from tvmconv import cli
from tvmconv.benchmarks import prebuild
from tvmconv.devices.sharing import LOCK_VARIABLE
from tvmconv.measure.workers import pool


@pytest.fixture
def bench(request):
    """Run `tvmconv bench`, by default the benchmark that the test file names; the exit status."""
    name = request.path.stem.removeprefix("test_").replace("_", "-")
    return lambda words, benchmark=name: cli.main(["bench", benchmark, *map(str, words)])


@pytest.fixture
def prebuild_in_threads(monkeypatch):
    """`bench prebuild` builds in this process: its processes take two seconds to load TVM, each time."""
    monkeypatch.setattr(prebuild, "start_builders", ThreadPoolExecutor)


class InThisProcess:
    """A context of `multiprocessing` whose processes are functions that run when they are started."""

    SimpleQueue = queue.SimpleQueue

    class Process:
        """A process that has ended when it was started."""

        def __init__(self, target, args):
            self.run, self.exitcode = lambda: target(*args), None
            self.is_alive, self.join, self.terminate = (lambda: False), (lambda seconds: None), (lambda: None)

        def start(self):
            try:
                self.run()
            except SystemExit as end:
                self.exitcode = end.code


@pytest.fixture
def in_this_process(monkeypatch):
    """Lanes of a suite run in this process, one after another."""
    monkeypatch.setenv(LOCK_VARIABLE, "")
    monkeypatch.setattr("multiprocessing.get_context", lambda kind: InThisProcess)
    monkeypatch.setattr(pool, "keep_workers_alive", lambda **how: nullcontext())
