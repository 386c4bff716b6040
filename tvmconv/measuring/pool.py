"""The builder processes as their parent sees them: each builds one config at a time, and may die of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from tvmconv.errors import Error
from tvmconv.knobs import Config
from tvmconv.logs.record import ErrorKind
from tvmconv.measuring.builder import Built, Task
from tvmconv.measuring.child import Child, Last

START_SECONDS = 120.0  # for loading TVM on a busy machine
MAX_FAILED_STARTS = 5
DEPTH = 2  # configs at a builder: the one that it builds, and the next, so that it need not wait for this process


@dataclass
class _Builder:
    """One process, and what it is doing.

    Attributes:
        since: when it began what it is doing.
        configs: those that it has, with their tags; it builds the first.
        ready: whether it has loaded all that it needs.
    """

    child: Child
    since: float
    configs: deque[tuple[int, Config]] = field(default_factory=deque)
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
        for depth in range(DEPTH):
            for builder in self._builders:
                if self._waiting and builder.ready and len(builder.configs) == depth:
                    if not builder.configs:
                        builder.since = time.monotonic()
                    builder.configs.append(self._waiting.popleft())
                    builder.child.send(builder.configs[-1][1])
        return ended

    def waitables(self) -> Sequence[Connection]:
        """What becomes readable when `poll` has something to tell."""
        return [builder.child.connection for builder in self._builders]

    def close(self) -> None:
        """End all processes."""
        while self._builders:
            self._builders.pop().child.kill()

    def _start(self) -> _Builder:
        child = Child("tvmconv.measuring.builder")
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
                elif builder.configs:
                    tag, _ = builder.configs.popleft()
                    builder.since = time.monotonic()
                    last = isinstance(message, Last)
                    ended.append((tag, message.message if last else message))
                    if last:
                        self._take_back(builder)
                        return ended + self._replace(i)
        except EOFError:
            return ended + self._replace(i)
        seconds = time.monotonic() - builder.since
        if builder.configs and seconds > self._timeout:
            message = f"the build takes longer than {self._timeout:g} s"
            return ended + self._replace(i, ErrorKind.BUILD_TIMEOUT, message)
        if not builder.ready and seconds > START_SECONDS:
            return ended + self._replace(i)
        return ended

    def _replace(
        self, i: int, kind: ErrorKind = ErrorKind.COMPILE_HOST, message: str | None = None
    ) -> list[tuple[int, Built]]:
        """Start a builder anew; the config that it was building, if any, has failed, by default as the process ended.

        What it had not begun is for whichever builder comes to it.

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
        failed = [builder.configs.popleft()[0]] if builder.configs else []
        self._take_back(builder)
        return [(tag, Built(None, kind, message, seconds=time.monotonic() - builder.since)) for tag in failed]

    def _take_back(self, builder: _Builder) -> None:
        """Queue again, before all others, what a builder has not begun."""
        self._waiting.extendleft(reversed(builder.configs))
        builder.configs.clear()
