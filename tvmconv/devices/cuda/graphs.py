"""Timing with CUDA graphs and events, which excludes the host's launch overhead.

`time_buffer_sets` times both generated kernels and the libraries that they are compared with.
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

from tvmconv.devices import cuda
from tvmconv.devices.device import LONG_LAUNCH_SECONDS, BufferSets, Timing
from tvmconv.errors import DeviceError

EVENT_RESOLUTION_SECONDS = 0.5e-6  # approximate resolution of CUDA events
MIN_REPLAY_SECONDS = 200e-6  # the event resolution is a quarter of a percent of this time
MAX_LAUNCHES = 200
MIN_REPLAYS, MAX_REPLAYS = 20, 10_000
MAX_SLOW_SECONDS, MIN_SLOW_REPLAYS = 0.35, 3  # replays of slow kernels: fewer than MIN_REPLAYS after this time
NUM_PROBES, PROBE_SECONDS = 4, 10e-3  # extra replays that estimate the launch time if the first is shorter than this
WARM_UP_SECONDS = 0.05  # a GPU that was just busy reaches its full clocks within this time
IDLE_WARM_UP_SECONDS = 0.2  # an idle GPU keeps its low clocks for a part of this time
MAX_WARM_UP_SECONDS = 0.5  # the warm-up ends after this time even if the launch time still changes
TURN_WARM_UP_SECONDS = 0.01  # before the first turn, which does not count either
SPAN_SECONDS, MAX_SPAN_REPLAYS = 0.015, 500  # a span of consecutive replays, of which the fastest is compared
NUM_STEADY_SPANS, MAX_STEADY_SPREAD = 3, 0.02  # clocks are steady if this many spans differ by at most this fraction

Replay = Callable[[], None]


@dataclass(frozen=True)
class ReplayTiming:
    """Result of `time_replays`."""

    seconds: tuple[float, ...]  # seconds per launch, one number per replay
    launches_per_replay: int  # number of launches in each replay


def check_cuda(result: tuple[Any, ...]) -> Any:
    """Return the value in a result of cuda-bindings, which is a tuple that begins with an error code."""
    error, *values = result
    if int(error):
        is_driver = isinstance(error, cuda.driver.CUresult)
        _, text = cuda.driver.cuGetErrorString(error) if is_driver else cuda.runtime.cudaGetErrorString(error)
        raise DeviceError(f"CUDA: {text.decode()}")
    return values[0] if values else None


def query_attribute(name: str, device: int) -> int:
    """Return the value of `cudaDevAttrNAME` for the device with an index."""
    attribute = getattr(cuda.runtime.cudaDeviceAttr, f"cudaDevAttr{name}")
    return int(check_cuda(cuda.runtime.cudaDeviceGetAttribute(attribute, device)))


@contextmanager
def create_stream(index: int) -> Iterator[int]:
    """Create a stream that does not synchronize with the default stream, and yield its handle as an int."""
    check_cuda(cuda.runtime.cudaSetDevice(index))
    stream = check_cuda(cuda.runtime.cudaStreamCreateWithFlags(cuda.runtime.cudaStreamNonBlocking))
    destroy = cuda.runtime.cudaStreamDestroy  # at the exit of the interpreter, nothing can be imported any more
    try:
        yield int(stream)
    finally:
        destroy(stream)


class CudaGraph:
    """A CUDA graph of captured launches, which one call replays."""

    def __init__(self, stream: int, num_launches: int, launch: Callable[[int], None]) -> None:
        """Capture `launch(0)`, `launch(1)`, ... `launch(num_launches - 1)`, which must use only `stream`."""
        # In thread-local mode, other threads of the process can still allocate memory.
        mode = cuda.runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        check_cuda(cuda.runtime.cudaStreamBeginCapture(stream, mode))
        try:
            for i in range(num_launches):
                launch(i)
        finally:
            capture_result = cuda.runtime.cudaStreamEndCapture(stream)
        graph = check_cuda(capture_result)
        try:
            self._executable = check_cuda(cuda.runtime.cudaGraphInstantiate(graph, 0))
        finally:
            cuda.runtime.cudaGraphDestroy(graph)
        self._stream = stream
        weakref.finalize(self, cuda.runtime.cudaGraphExecDestroy, self._executable)

    def replay(self) -> None:
        """Queue all launches of the graph."""
        check_cuda(cuda.runtime.cudaGraphLaunch(self._executable, self._stream))


def make_capture(stream: int, launch: Callable[[int], None]) -> Callable[[int], Replay]:
    """Return a function for `time_replays` that captures a number of launches on `stream` in a graph."""
    return lambda launches: CudaGraph(stream, launches, launch).replay


def time_buffer_sets(capture: Callable[[int], Replay], stream: int, sets: BufferSets, seconds: float) -> Timing:
    """Time launches that cycle through buffer sets.

    `capture`: function from a number of launches to a function that queues them; they have run before. Launch i works
        on set i modulo `sets.num_sets`.
    """
    replays = time_replays(capture, stream, launch_multiple=sets.num_sets, seconds=seconds)
    counts = f"{replays.launches_per_replay} launches, {len(replays.seconds)} replays"
    method = f"CUDA graph of {counts}, {sets.describe('L2')}"
    return Timing(replays.seconds, method, cold=sets.min_cold_bytes > 0)


class GraphTimer:
    """Timer of launches in turns, between which other kernels run; see `TurnTimer`.

    The first replay of a turn does not count: it finds the cache as others left it.

    Args:
        capture: Function from a number of launches to a function that queues them; they have run before.
        stream: Stream of the launches.
        sets: Buffer sets that launches cycle through.
    """

    def __init__(self, capture: Callable[[int], Replay], stream: int, sets: BufferSets) -> None:
        self._stream, self._sets, self._launches = stream, sets, sets.num_sets
        self._replay = capture(sets.num_sets)
        (self._replay_seconds,) = time_between_events(stream, self._replay, 1)
        self._is_long = self._replay_seconds >= sets.num_sets * LONG_LAUNCH_SECONDS
        self._samples = [self._replay_seconds / sets.num_sets] * self._is_long
        if not self._is_long:
            time_between_events(stream, self._replay, max(1, int(TURN_WARM_UP_SECONDS / self._replay_seconds)))
            self._replay, self._launches = capture_until_long_enough(capture, stream, launch_multiple=sets.num_sets)
            self._replay_seconds = min(time_between_events(stream, self._replay, NUM_PROBES))

    def take_turn(self, seconds: float, *, counts: bool = True) -> None:
        """Time launches for about these seconds, unless they are long; the times count if `counts`."""
        if self._is_long:
            return
        count = 1 + max(1, int(seconds / self._replay_seconds))
        samples = time_between_events(self._stream, self._replay, count)[1:]
        self._replay_seconds = min(samples)
        if counts:
            self._samples += [sample / self._launches for sample in samples]

    def finish(self) -> Timing:
        """Return the times of all turns."""
        counts = f"{self._launches} launches, {len(self._samples)} replays"
        method = f"CUDA graph of {counts} in turns, {self._sets.describe('L2')}"
        return Timing(tuple(self._samples), method, cold=self._sets.min_cold_bytes > 0)


def time_replays(
    capture: Callable[[int], Replay],
    stream: int,
    *,
    launch_multiple: int,
    seconds: float,
    warm_up_seconds: float | None = None,
) -> ReplayTiming:
    """Time replays of a number of launches, with an event between consecutive replays.

    A replay has as many launches as take `MIN_REPLAY_SECONDS`, at most `MAX_LAUNCHES`, rounded up to `launch_multiple`.

    `capture`: function from a number of launches to a function that queues them; the kernel has run before.
    `launch_multiple`: number of buffer sets that the launches cycle through.
    `seconds`: approximate device time to spend. Launches of `LONG_LAUNCH_SECONDS` are replayed once, without warm-up.
    `warm_up_seconds`: minimum duration of the warm-up; `WARM_UP_SECONDS` by default.
    """
    # The warm-up also gives the launch time, because a launch on an idle GPU seems to take many times as long.
    replay_seconds = warm_up(capture(launch_multiple), stream, warm_up_seconds)
    if replay_seconds / launch_multiple >= LONG_LAUNCH_SECONDS:
        return ReplayTiming((replay_seconds / launch_multiple,), launch_multiple)
    replay, launches = capture_until_long_enough(capture, stream, launch_multiple=launch_multiple)
    times = time_between_events(stream, replay, _count_replays(seconds, replay_seconds * launches / launch_multiple))
    return ReplayTiming(tuple(replay_time / launches for replay_time in times), launches)


def time_replay(replay: Replay, stream: int, seconds: float) -> list[float]:
    """Return the seconds of each replay after a warm-up."""
    replay_seconds = warm_up(replay, stream)
    if replay_seconds >= LONG_LAUNCH_SECONDS:
        return [replay_seconds]
    return time_between_events(stream, replay, _count_replays(seconds, replay_seconds))


def _count_replays(seconds: float, replay_seconds: float) -> int:
    min_replays = min(max(MAX_SLOW_SECONDS / replay_seconds, MIN_SLOW_REPLAYS), MIN_REPLAYS)
    return int(min(max(seconds / replay_seconds, min_replays), MAX_REPLAYS))


def capture_until_long_enough(
    capture: Callable[[int], Replay], stream: int, *, launch_multiple: int
) -> tuple[Replay, int]:
    """Return a replay that is long enough to be timed and its number of launches; see `time_replays`."""
    probe = capture(launch_multiple)
    (launch_seconds,) = time_between_events(stream, probe, 1)
    if launch_seconds < PROBE_SECONDS:  # a single probe may have been delayed
        launch_seconds = min(time_between_events(stream, probe, NUM_PROBES))
    min_launches = min(max(MIN_REPLAY_SECONDS * launch_multiple / launch_seconds, 1), MAX_LAUNCHES)
    launches = launch_multiple * math.ceil(min_launches / launch_multiple)
    return (probe if launches == launch_multiple else capture(launches)), launches


def warm_up(replay: Replay, stream: int, seconds: float | None = None) -> float:
    """Replay until consecutive spans of replays take equally long, so that the GPU's clocks are steady.

    A replay of `IDLE_WARM_UP_SECONDS` or more is sufficient warm-up and is not repeated.

    `seconds`: minimum duration, `WARM_UP_SECONDS` by default; the maximum is `MAX_WARM_UP_SECONDS`.
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
    """Return whether `NUM_STEADY_SPANS` spans differ by at most `MAX_STEADY_SPREAD` or the event resolution."""
    if len(spans) < NUM_STEADY_SPANS:
        return False
    return max(spans) - min(spans) <= max(MAX_STEADY_SPREAD * min(spans), EVENT_RESOLUTION_SECONDS)


def time_between_events(stream: int, replay: Replay, count: int) -> list[float]:
    """Return the seconds of each of `count` replays, which are queued without waiting in between."""
    events: list[Any] = []
    try:
        for _ in range(count + 1):
            events.append(check_cuda(cuda.runtime.cudaEventCreate()))
        check_cuda(cuda.runtime.cudaEventRecord(events[0], stream))
        for event in events[1:]:
            replay()
            check_cuda(cuda.runtime.cudaEventRecord(event, stream))
        check_cuda(cuda.runtime.cudaStreamSynchronize(stream))
        return [check_cuda(cuda.runtime.cudaEventElapsedTime(start, stop)) / 1e3 for start, stop in pairwise(events)]
    finally:
        for event in events:
            cuda.runtime.cudaEventDestroy(event)
