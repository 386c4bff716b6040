"""The builder processes as their parent sees them: each has one config at a time, and may die of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tvmconv.errors import Error
from tvmconv.knobs import Config
from tvmconv.tuning.builder import Built, Task
from tvmconv.tuning.child import Child, Last
from tvmconv.tuning.record import ErrorKind

START_SECONDS = 120.0  # for loading TVM on a busy machine
MAX_FAILED_STARTS = 5


@dataclass
class _Builder:
    """One process, and what it is doing.

    Attributes:
        tag: of the config that it builds; None when it has none.
        ready: whether it has loaded all that it needs.
        since: when it began what it is doing.
    """

    child: Child
    since: float
    tag: int | None = None
    ready: bool = False


class Pool:
    """Builds configs in processes of their own.

    A config that hangs, crashes its process or allocates without end costs that process, which is started again, and
    becomes one `Built` with the error.

    Args:
        task: what is built.
        workers: number of processes.
        timeout: seconds for one build.
    """

    def __init__(self, task: Task, workers: int, timeout: float) -> None:
        self._task = task
        self._timeout = timeout
        self._waiting: deque[tuple[int, Config]] = deque()
        self._failed_starts = 0
        self._builders: list[_Builder] = []
        for _ in range(workers):
            self._builders.append(self._start())

    def submit(self, tag: int, config: Config) -> None:
        """Queue a config; `tag` comes back with what it becomes."""
        self._waiting.append((tag, config))

    def poll(self) -> list[tuple[int, Built]]:
        """Deal out what is queued; what has ended since the last call, by tag.

        Raises:
            Error: the builder processes do not start.
        """
        ended = [item for i in range(len(self._builders)) for item in self._poll(i)]
        for builder in self._builders:
            if self._waiting and builder.ready and builder.tag is None:
                builder.tag, config = self._waiting.popleft()
                builder.since = time.monotonic()
                builder.child.send(config)
        return ended

    def waitables(self) -> Sequence[Connection]:
        """What becomes readable when `poll` has something to tell."""
        return [builder.child.connection for builder in self._builders]

    def close(self) -> None:
        """End all processes."""
        while self._builders:
            self._builders.pop().child.kill()

    def _start(self) -> _Builder:
        child = Child("tvmconv.tuning.builder")
        child.send(self._task)
        return _Builder(child, since=time.monotonic())

    def _poll(self, i: int) -> list[tuple[int, Built]]:
        """What one builder has to tell; it is replaced if it has ended, or has to end."""
        builder = self._builders[i]
        ended: list[tuple[int, Built]] = []
        try:
            for message in builder.child.received():
                if message is None:
                    builder.ready, self._failed_starts = True, 0
                elif isinstance(message, str):
                    raise Error(f"a builder process cannot load schedule {self._task.schedule.name}: {message}")
                elif builder.tag is not None:
                    last = isinstance(message, Last)
                    ended.append((builder.tag, message.message if last else message))
                    builder.tag = None
                    if last:
                        return ended + self._replace(i)
        except EOFError:
            return ended + self._replace(i)
        seconds = time.monotonic() - builder.since
        if builder.tag is not None and seconds > self._timeout:
            message = f"the build takes longer than {self._timeout:g} s"
            return ended + self._replace(i, ErrorKind.BUILD_TIMEOUT, message)
        if not builder.ready and seconds > START_SECONDS:
            return ended + self._replace(i)
        return ended

    def _replace(
        self, i: int, kind: ErrorKind = ErrorKind.COMPILE_HOST, message: str | None = None
    ) -> list[tuple[int, Built]]:
        """Start a builder anew; the config that it was building, if any, has failed, by default as the process ended.

        Raises:
            Error: the builders end before they are ready, time and again.
        """
        builder = self._builders[i]
        how = builder.child.kill()
        message = message or f"the builder process {how}"
        if not builder.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise Error(f"the builder processes do not start: {message}")
        self._builders[i] = self._start()
        if builder.tag is None:
            return []
        return [(builder.tag, Built(None, kind, message, seconds=time.monotonic() - builder.since))]
