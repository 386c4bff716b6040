"""How long calls of PyTorch take: in CUDA graphs between events on a GPU, and on the clock elsewhere."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import torch

from tvmconv.devices.cuda.graphs import time_between_events

NUM_WARM_UP_CALLS = 3
TIMING_SECONDS = 0.05  # of each timing
MAX_TIMING_SECONDS = 0.5  # after which a warm-up, and samples of a slow call, are enough whatever their number
MIN_SAMPLES, MAX_SAMPLES = 5, 200
SLICE_SECONDS = 0.1  # a call that takes longer has not waited for a time slice or two alone
STEADY_SPREAD = 0.2  # of the quartiles, relative to the median: where they are further apart, more samples are taken
MAX_LAUNCHES_PER_GRAPH = 10  # calls in a graph
WAKE_SECONDS = 0.1
WARM_SECONDS, GRAPH_SECONDS = 0.004, 0.01  # of replays: layers are timed by the hundred, and keep the clocks up


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """The seconds of a call, the median of some.

    On a GPU calls are captured in a graph, so that what the host does in between does not count; what cannot be
    captured is timed with it.
    """
    with torch.no_grad():
        if device.type != "cuda":
            return _time_on_cpu(call)
        with torch.cuda.device(device):
            return _time_on_gpu(call)


def _time_on_cpu(call: Callable[[], object]) -> float:
    """Return the seconds of a call by PyTorch's threads; of a short one by one thread, where that takes less.

    On a busy machine threads wait for one another until the scheduler gives each its turn, which is tens of
    milliseconds of a call of microseconds, and says nothing about the call.
    """
    call_seconds = time_wall_clock(call, lambda: None)
    threads = torch.get_num_threads()
    if threads == 1 or call_seconds > SLICE_SECONDS:
        return call_seconds
    torch.set_num_threads(1)
    try:
        return min(call_seconds, time_wall_clock(call, lambda: None))
    finally:
        torch.set_num_threads(threads)


def _time_on_gpu(call: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm_seconds = _warm_up(call, stream.synchronize)
        if _is_synchronizing(call):
            return time_wall_clock(call, torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        try:
            num_launches = max(
                1, min(MAX_LAUNCHES_PER_GRAPH, int(TIMING_SECONDS / warm_seconds))
            )  # a slow call is timed by itself
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(num_launches):
                    call()
        except RuntimeError:
            _end_capture(stream)
            return time_wall_clock(call, torch.cuda.synchronize)
        replay_seconds, started_at = 0.0, time.perf_counter()
        while not replay_seconds or time.perf_counter() - started_at < WARM_SECONDS:
            replay_seconds = time_between_events(stream.cuda_stream, graph.replay, 1)[0]
        count = int(min(max(GRAPH_SECONDS / replay_seconds, MIN_SAMPLES), MAX_SAMPLES))
        return statistics.median(time_between_events(stream.cuda_stream, graph.replay, count)) / num_launches


def _warm_up(call: Callable[[], object], wait_for_device: Callable[[], object]) -> float:
    """Call `NUM_WARM_UP_CALLS` times, or as `MAX_TIMING_SECONDS` allow; return the seconds of the last call."""
    started_at = time.perf_counter()
    for _ in range(NUM_WARM_UP_CALLS):
        start = time.perf_counter()
        call()
        wait_for_device()
        finished_at = time.perf_counter()
        if finished_at - started_at > MAX_TIMING_SECONDS:
            break
    return finished_at - start


def _is_synchronizing(call: Callable[[], object]) -> bool:
    """Whether a call waits for the GPU, which in a capture it must not; as far as PyTorch sees that."""
    previous_mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the mode, that it is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            call()
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode(previous_mode)
    return False


def _end_capture(stream: torch.cuda.Stream) -> None:
    """Capture something that can be: what failed to be captured leaves random numbers in a state of capture."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        torch.zeros(1, device=stream.device)


def raise_clocks(call: Callable[[], object], device: torch.device) -> None:
    """Call for as long as an idle GPU takes to raise its clocks."""
    if device.type == "cuda":
        started_at = time.perf_counter()
        while time.perf_counter() - started_at < WAKE_SECONDS:
            call()
            torch.cuda.synchronize(device)


def make_waiter(device: torch.device) -> Callable[[], None]:
    """What waits until a device has done all that was queued."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def time_wall_clock(call: Callable[[], object], wait_for_device: Callable[[], None]) -> float:
    """Return the seconds of a call and of a wait: the lower quartile, as whatever disturbs a timing lengthens it."""
    _warm_up(call, wait_for_device)
    times: list[float] = []
    started_at = time.perf_counter()
    while len(times) < MAX_SAMPLES:
        start = time.perf_counter()
        call()
        wait_for_device()
        times.append(time.perf_counter() - start)
        max_seconds = TIMING_SECONDS if len(times) >= MIN_SAMPLES and _is_steady(times) else MAX_TIMING_SECONDS
        if time.perf_counter() - started_at > max_seconds:
            break
    return _quartiles(times)[0]


def _quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [*times] * 3
    return low, middle, high


def _is_steady(times: Sequence[float]) -> bool:
    low, middle, high = _quartiles(times)
    return high - low <= STEADY_SPREAD * middle
