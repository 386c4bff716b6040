"""CUDA graphs and events, to time device work of microseconds without the host in between.

Kernels and the libraries that they are compared with are timed by the same function here, `time_buffer_sets`.
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

from tvmconv.devices.device import LONG_LAUNCH_SECONDS, BufferSets, Timing
from tvmconv.errors import DeviceError

EVENT_RESOLUTION_SECONDS = 0.5e-6  # that an event resolves, about
MIN_REPLAY_SECONDS = 200e-6  # of which that is a quarter of a percent
MAX_LAUNCHES = 200
MIN_REPLAYS, MAX_REPLAYS = 20, 1000
MAX_SLOW_SECONDS, MIN_SLOW_REPLAYS = 0.35, 3  # of those at least, where each takes long: a third of a comparison
NUM_PROBES, PROBE_SECONDS = (
    4,
    10e-3,
)  # replays that tell how long a launch takes, where the first one takes less than this
WARM_UP_SECONDS = 0.05  # a GPU that has just been busy keeps its clocks, or raises them within this time
IDLE_WARM_UP_SECONDS = 0.2  # one that has been idle keeps its low clocks for a part of this time
MAX_WARM_UP_SECONDS = 0.5  # after which a kernel is timed though its time still changes
SPAN_SECONDS, MAX_SPAN_REPLAYS = 0.015, 500  # replays in a row, whose fastest tells how fast the GPU runs then
NUM_STEADY_SPANS, MAX_STEADY_SPREAD = 3, 0.02  # so many spans in a row differ by no more where the clocks are steady

Replay = Callable[[], None]


@dataclass(frozen=True)
class ReplayTiming:
    """What `time_replays` measured.

    Attributes:
        seconds: seconds per launch, one number a replay.
        launches_per_replay: launches in each replay.
    """

    seconds: tuple[float, ...]
    launches_per_replay: int


def check_cuda(result: tuple[Any, ...]) -> Any:
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
def create_stream(index: int) -> Iterator[int]:
    """A stream of device `index` that does not wait for the default stream; its handle as an int."""
    from cuda.bindings import runtime

    check_cuda(runtime.cudaSetDevice(index))
    stream = check_cuda(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))
    try:
        yield int(stream)
    finally:
        runtime.cudaStreamDestroy(stream)


class CudaGraph:
    """Launches captured once, to be replayed with one call."""

    def __init__(self, stream: int, num_launches: int, launch: Callable[[int], None]) -> None:
        """Capture `launch(0)`, `launch(1)`, ... `launch(num_launches - 1)`, which must work on `stream` only.

        Raises:
            DeviceError: the launches cannot be captured.
        """
        from cuda.bindings import runtime

        # Thread-local: other threads of the process may go on allocating.
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        check_cuda(runtime.cudaStreamBeginCapture(stream, mode))
        try:
            for i in range(num_launches):
                launch(i)
        finally:
            capture_result = runtime.cudaStreamEndCapture(stream)
        graph = check_cuda(capture_result)
        try:
            self._executable = check_cuda(runtime.cudaGraphInstantiate(graph, 0))
        finally:
            runtime.cudaGraphDestroy(graph)
        self._stream = stream
        weakref.finalize(self, runtime.cudaGraphExecDestroy, self._executable)

    def replay(self) -> None:
        """Queue all launches."""
        from cuda.bindings import runtime

        check_cuda(runtime.cudaGraphLaunch(self._executable, self._stream))


def make_capture(stream: int, launch: Callable[[int], None]) -> Callable[[int], Replay]:
    """For `time_replays`: capture a number of launches on `stream` in a graph."""
    return lambda launches: CudaGraph(stream, launches, launch).replay


def time_buffer_sets(capture: Callable[[int], Replay], stream: int, sets: BufferSets, seconds: float) -> Timing:
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
    replays = time_replays(capture, stream, launch_multiple=sets.num_sets, seconds=seconds)
    method = (
        f"CUDA graph of {replays.launches_per_replay} launches, {len(replays.seconds)} replays, {sets.describe('L2')}"
    )
    return Timing(replays.seconds, method, cold=sets.min_cold_bytes > 0)


def time_replays(
    capture: Callable[[int], Replay],
    stream: int,
    *,
    launch_multiple: int,
    seconds: float,
    warm_up_seconds: float | None = None,
) -> ReplayTiming:
    """Time replays of a number of launches on a stream, with an event between any two replays.

    A replay has as many launches as take `MIN_REPLAY_SECONDS`, at most `MAX_LAUNCHES`, rounded up to `launch_multiple`.

    Args:
        capture: from a number of launches to the function that queues them all; their kernel has run before.
        stream: on which they are queued.
        launch_multiple: number of buffer sets that the launches go through in turn.
        seconds: device time to spend, about; launches of `LONG_LAUNCH_SECONDS` are replayed once, without a warm-up.
        warm_up_seconds: as for `warm_up`.

    Raises:
        DeviceError: a launch fails.
    """
    # Of an idle GPU, a launch seems to take many times as long as it does.
    replay_seconds = warm_up(capture(launch_multiple), stream, warm_up_seconds)
    if replay_seconds / launch_multiple >= LONG_LAUNCH_SECONDS:
        return ReplayTiming((replay_seconds / launch_multiple,), launch_multiple)
    replay, launches = capture_until_long_enough(capture, stream, launch_multiple=launch_multiple)
    times = time_between_events(stream, replay, _count_replays(seconds, replay_seconds * launches / launch_multiple))
    return ReplayTiming(tuple(replay_time / launches for replay_time in times), launches)


def time_replay(replay: Replay, stream: int, seconds: float) -> list[float]:
    """The seconds that each replay takes, after a warm-up.

    Args:
        replay: queues what is timed on the stream.
        stream: on which it is queued.
        seconds: device time to spend, about.
    """
    replay_seconds = warm_up(replay, stream)
    return (
        [replay_seconds]
        if replay_seconds >= LONG_LAUNCH_SECONDS
        else time_between_events(stream, replay, _count_replays(seconds, replay_seconds))
    )


def _count_replays(seconds: float, replay_seconds: float) -> int:
    """How many replays to time within about so many seconds, when one takes `replay_seconds`."""
    min_replays = min(max(MAX_SLOW_SECONDS / replay_seconds, MIN_SLOW_REPLAYS), MIN_REPLAYS)
    return int(min(max(seconds / replay_seconds, min_replays), MAX_REPLAYS))


def capture_until_long_enough(
    capture: Callable[[int], Replay], stream: int, *, launch_multiple: int
) -> tuple[Replay, int]:
    """A replay that lasts long enough to be timed, and its number of launches; arguments as for `time_replays`."""
    probe = capture(launch_multiple)
    (launch_seconds,) = time_between_events(stream, probe, 1)
    if launch_seconds < PROBE_SECONDS:  # the shortest of several: any may have been held up
        launch_seconds = min(time_between_events(stream, probe, NUM_PROBES))
    launch_seconds /= launch_multiple
    launches = launch_multiple * math.ceil(
        min(max(MIN_REPLAY_SECONDS / launch_seconds, 1), MAX_LAUNCHES) / launch_multiple
    )
    return (probe if launches == launch_multiple else capture(launches)), launches


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
    min_seconds = WARM_UP_SECONDS if seconds is None else seconds
    start = time.perf_counter()
    (replay_seconds,) = time_between_events(stream, replay, 1)
    if replay_seconds >= IDLE_WARM_UP_SECONDS:
        return replay_seconds
    spans: list[float] = []
    while True:
        count = min(max(int(SPAN_SECONDS / max(replay_seconds, 1e-9)), 1), MAX_SPAN_REPLAYS)
        replay_seconds = min(time_between_events(stream, replay, count))
        spans.append(replay_seconds)
        elapsed = time.perf_counter() - start
        if elapsed >= MAX_WARM_UP_SECONDS or (elapsed >= min_seconds and _is_steady(spans[-NUM_STEADY_SPANS:])):
            return replay_seconds


def _is_steady(spans: Sequence[float]) -> bool:
    """Return whether there are `NUM_STEADY_SPANS` spans that differ by no more than allowed, or than events resolve."""
    if len(spans) < NUM_STEADY_SPANS:
        return False
    return max(spans) - min(spans) <= max(MAX_STEADY_SPREAD * min(spans), EVENT_RESOLUTION_SECONDS)


def time_between_events(stream: int, replay: Replay, count: int) -> list[float]:
    """Seconds between the events around each of `count` replays, queued without waiting in between."""
    from cuda.bindings import runtime

    events: list[Any] = []
    try:
        for _ in range(count + 1):
            events.append(check_cuda(runtime.cudaEventCreate()))
        check_cuda(runtime.cudaEventRecord(events[0], stream))
        for event in events[1:]:
            replay()
            check_cuda(runtime.cudaEventRecord(event, stream))
        check_cuda(runtime.cudaStreamSynchronize(stream))
        return [
            check_cuda(runtime.cudaEventElapsedTime(start_event, stop_event)) / 1e3
            for start_event, stop_event in pairwise(events)
        ]
    finally:
        for event in events:
            runtime.cudaEventDestroy(event)
