"""Timing of PyTorch calls: CUDA graphs between events on a GPU, wall-clock time elsewhere."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import torch

from tvmconv.devices.cuda.graphs import time_between_events

NUM_WARM_UP_CALLS = 3
TIMING_SECONDS = 0.05  # duration of one timing
MAX_TIMING_SECONDS = 0.5  # limit of a warm-up, and of the samples of a slow call
MIN_SAMPLES, MAX_SAMPLES = 5, 200
SLICE_SECONDS = 0.1  # waiting for scheduler time slices does not explain a longer call
STEADY_SPREAD = 0.2  # largest interquartile range relative to the median; beyond it more samples are taken
MAX_LAUNCHES_PER_GRAPH = 10
WAKE_SECONDS = 0.1
WARM_SECONDS, GRAPH_SECONDS = 0.004, 0.01  # duration of replays; short, as timings of many layers keep clocks high


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call in seconds.

    On a GPU, calls are captured in a CUDA graph, which excludes the time of the host between launches. A call that
    cannot be captured is timed with that time included.

    Args:
        call: Function to time.
        device: PyTorch's device on which it runs.
    """
    with torch.no_grad():
        if device.type != "cuda":
            return _time_on_cpu(call)
        with torch.cuda.device(device):
            return _time_on_gpu(call)


def _time_on_cpu(call: Callable[[], object]) -> float:
    """Return the seconds of a call with PyTorch's threads; a short call is also timed with one thread, and the minimum
    counts.

    On a busy machine, threads wait for each other until the scheduler runs each of them. This adds tens of milliseconds
    to a call of microseconds, and says nothing about the call.
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
            num_launches = max(1, min(MAX_LAUNCHES_PER_GRAPH, int(TIMING_SECONDS / warm_seconds)))
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
    """Return whether a call waits for the GPU, as far as PyTorch detects it; a captured call must not."""
    previous_mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            call()
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode(previous_mode)
    return False


def _end_capture(stream: torch.cuda.Stream) -> None:
    """Capture a valid call, because a failed capture leaves the random number generator in a capturing state."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        torch.zeros(1, device=stream.device)


def raise_clocks(call: Callable[[], object], device: torch.device) -> None:
    """Repeat a call for as long as an idle GPU takes to raise its clocks."""
    if device.type == "cuda":
        started_at = time.perf_counter()
        while time.perf_counter() - started_at < WAKE_SECONDS:
            call()
            torch.cuda.synchronize(device)


def make_waiter(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until a device has finished all queued work."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def time_wall_clock(call: Callable[[], object], wait_for_device: Callable[[], None]) -> float:
    """Return the lower quartile of the seconds of a call and a wait, because disturbances only lengthen a timing.

    Args:
        call: Function to time.
        wait_for_device: Function that waits for the end of the call.
    """
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
