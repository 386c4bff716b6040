"""CUDA graphs and events, to time device work of microseconds without the host in between.

Kernels and the libraries that they are compared with are timed by the same function here, `time_sets`.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tvmconv.devices.base import LONG_LAUNCH_SECONDS, BufferSets, Timing
from tvmconv.errors import DeviceError

EVENT_SECONDS = 0.5e-6  # that an event resolves, about
REPLAY_SECONDS = 200e-6  # of which that is a quarter of a percent
MAX_LAUNCHES = 200
MIN_REPLAYS, MAX_REPLAYS = 20, 1000
BEARABLE_SECONDS, FEWEST_REPLAYS = 0.35, 3  # of those at least, where each takes long: a third of a comparison
PROBES, PROBE_SECONDS = 4, 10e-3  # replays that tell how long a launch takes, where the first one takes less than this
WARM_UP_SECONDS = 0.05  # a GPU that has just been busy keeps its clocks, or raises them within this time
IDLE_WARM_UP_SECONDS = 0.2  # one that has been idle keeps its low clocks for a part of this time
MAX_WARM_UP_SECONDS = 0.5  # after which a kernel is timed though its time still changes
SPAN_SECONDS, MAX_SPAN_REPLAYS = 0.015, 500  # replays in a row, whose fastest tells how fast the GPU runs then
STEADY_SPANS, STEADY_DEVIATION = 3, 0.02  # so many spans in a row differ by no more where the clocks are steady

Replay = Callable[[], None]


@dataclass(frozen=True)
class Replays:
    """What `time_replays` measured.

    Attributes:
        seconds: seconds per launch, one number a replay.
        launches: launches in each replay.
    """

    seconds: tuple[float, ...]
    launches: int


def check(result: tuple[Any, ...]) -> Any:
    """The value of a call to cuda-bindings' runtime or driver, whose results begin with an error code.

    Raises:
        DeviceError: the code is not success.
    """
    from cuda.bindings import driver, runtime

    error, *values = result
    if int(error):
        is_driver = isinstance(error, driver.CUresult)
        _, text = driver.cuGetErrorString(error) if is_driver else runtime.cudaGetErrorString(error)
        raise DeviceError(f"CUDA: {text.decode()}")
    return values[0] if values else None


@contextmanager
def new_stream(index: int) -> Iterator[int]:
    """A stream of device `index` that does not wait for the default stream; its handle as an int."""
    from cuda.bindings import runtime

    check(runtime.cudaSetDevice(index))
    stream = check(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))
    try:
        yield int(stream)
    finally:
        runtime.cudaStreamDestroy(stream)


class Graph:
    """Launches captured once, to be replayed with one call."""

    def __init__(self, stream: int, launches: int, launch: Callable[[int], None]) -> None:
        """Capture `launch(0)`, `launch(1)`, ... `launch(launches - 1)`, which must work on `stream` only.

        Raises:
            DeviceError: the launches cannot be captured.
        """
        from cuda.bindings import runtime

        # Thread-local: other threads of the process may go on allocating.
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        check(runtime.cudaStreamBeginCapture(stream, mode))
        try:
            for i in range(launches):
                launch(i)
        finally:
            ended = runtime.cudaStreamEndCapture(stream)
        graph = check(ended)
        try:
            self._executable = check(runtime.cudaGraphInstantiate(graph, 0))
        finally:
            runtime.cudaGraphDestroy(graph)
        self._stream = stream
        weakref.finalize(self, runtime.cudaGraphExecDestroy, self._executable)

    def replay(self) -> None:
        """Queue all launches."""
        from cuda.bindings import runtime

        check(runtime.cudaGraphLaunch(self._executable, self._stream))


def capture_on(stream: int, launch: Callable[[int], None]) -> Callable[[int], Replay]:
    """For `time_replays`: capture a number of launches on `stream` in a graph."""
    return lambda launches: Graph(stream, launches, launch).replay


def time_sets(capture: Callable[[int], Replay], stream: int, sets: BufferSets, seconds: float) -> Timing:
    """Time launches that go through buffer sets in turn.

    Args:
        capture: from a number of launches to the function that queues them all; they have run before. What launch i
            works on is set number i modulo `sets.count`.
        stream: on which they are queued.
        sets: the buffer sets.
        seconds: device time to spend, about.

    Raises:
        DeviceError: a launch fails.
    """
    replays = time_replays(capture, stream, multiple=sets.count, seconds=seconds)
    method = f"CUDA graph of {replays.launches} launches, {len(replays.seconds)} replays, {sets.describe('L2')}"
    return Timing(replays.seconds, method, cold=sets.cold_bytes > 0)


def time_replays(
    capture: Callable[[int], Replay],
    stream: int,
    *,
    multiple: int,
    seconds: float,
    warm_up_seconds: float | None = None,
) -> Replays:
    """Time replays of a number of launches on a stream, with an event between any two replays.

    A replay has as many launches as take `REPLAY_SECONDS`, at most `MAX_LAUNCHES`, rounded up to `multiple`.

    Args:
        capture: from a number of launches to the function that queues them all; their kernel has run before.
        stream: on which they are queued.
        multiple: number of buffer sets that the launches go through in turn.
        seconds: device time to spend, about; launches of `LONG_LAUNCH_SECONDS` are replayed once, without a warm-up.
        warm_up_seconds: as for `warm_up`.

    Raises:
        DeviceError: a launch fails.
    """
    # Of an idle GPU, a launch seems to take many times as long as it does.
    took = warm_up(capture(multiple), stream, warm_up_seconds)
    if took / multiple >= LONG_LAUNCH_SECONDS:
        return Replays((took / multiple,), multiple)
    replay, launches = capture_enough(capture, stream, multiple=multiple)
    times = between(stream, replay, _count(seconds, took * launches / multiple))
    return Replays(tuple(each / launches for each in times), launches)


def time_replay(replay: Replay, stream: int, seconds: float) -> list[float]:
    """The seconds that each replay takes, after a warm-up.

    Args:
        replay: queues what is timed on the stream.
        stream: on which it is queued.
        seconds: device time to spend, about.
    """
    took = warm_up(replay, stream)
    return [took] if took >= LONG_LAUNCH_SECONDS else between(stream, replay, _count(seconds, took))


def _count(seconds: float, took: float) -> int:
    """How many replays to time within about so many seconds, when one takes `took`."""
    fewest = min(max(BEARABLE_SECONDS / took, FEWEST_REPLAYS), MIN_REPLAYS)
    return int(min(max(seconds / took, fewest), MAX_REPLAYS))


def capture_enough(capture: Callable[[int], Replay], stream: int, *, multiple: int) -> tuple[Replay, int]:
    """A replay that lasts long enough to be timed, and its number of launches; arguments as for `time_replays`."""
    probe = capture(multiple)
    (once,) = between(stream, probe, 1)
    if once < PROBE_SECONDS:  # the shortest of several: any may have been held up
        once = min(between(stream, probe, PROBES))
    once /= multiple
    launches = multiple * math.ceil(min(max(REPLAY_SECONDS / once, 1), MAX_LAUNCHES) / multiple)
    return (probe if launches == multiple else capture(launches)), launches


def warm_up(replay: Replay, stream: int, seconds: float | None = None) -> float:
    """Replay until the GPU's clocks are steady: until several spans of replays in a row take alike.

    A replay of `IDLE_WARM_UP_SECONDS` or more is its own warm-up, and is not repeated.

    Args:
        replay: queues what is timed on the stream.
        stream: on which it is queued.
        seconds: how long to replay at least, `WARM_UP_SECONDS` by default; at most it is `MAX_WARM_UP_SECONDS`.

    Returns:
        The seconds of the fastest replay in the last span.
    """
    least = WARM_UP_SECONDS if seconds is None else seconds
    start = time.perf_counter()
    (took,) = between(stream, replay, 1)
    if took >= IDLE_WARM_UP_SECONDS:
        return took
    spans: list[float] = []
    while True:
        count = min(max(int(SPAN_SECONDS / max(took, 1e-9)), 1), MAX_SPAN_REPLAYS)
        took = min(between(stream, replay, count))
        spans.append(took)
        passed = time.perf_counter() - start
        if passed >= MAX_WARM_UP_SECONDS or (passed >= least and _is_steady(spans[-STEADY_SPANS:])):
            return took


def _is_steady(spans: Sequence[float]) -> bool:
    """Return whether there are `STEADY_SPANS` spans that differ by no more than allowed, or than events resolve."""
    if len(spans) < STEADY_SPANS:
        return False
    return max(spans) - min(spans) <= max(STEADY_DEVIATION * min(spans), EVENT_SECONDS)


def between(stream: int, replay: Replay, count: int) -> list[float]:
    """Seconds between the events around each of `count` replays, queued without waiting in between."""
    from cuda.bindings import runtime

    events: list[Any] = []
    try:
        for _ in range(count + 1):
            events.append(check(runtime.cudaEventCreate()))
        check(runtime.cudaEventRecord(events[0], stream))
        for event in events[1:]:
            replay()
            check(runtime.cudaEventRecord(event, stream))
        check(runtime.cudaStreamSynchronize(stream))
        return [check(runtime.cudaEventElapsedTime(before, after)) / 1e3 for before, after in pairwise(events)]
    finally:
        for event in events:
            runtime.cudaEventDestroy(event)
