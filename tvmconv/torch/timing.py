"""How long calls of PyTorch take: in CUDA graphs between events on a GPU, and on the clock elsewhere."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import torch

from tvmconv.devices.cuda.graphs import between

WARM_UP = 3
SECONDS = 0.05  # of each timing
LONG_SECONDS = 0.5  # after which a warm-up, and samples of a slow call, are enough whatever their number
FEWEST, MOST = 5, 200
SLICE_SECONDS = 0.1  # a call that takes longer has not waited for a time slice or two alone
STEADY_SPREAD = 0.2  # of the quartiles, relative to the median: where they are further apart, more samples are taken
LAUNCHES = 10  # calls in a graph
WAKE_SECONDS = 0.1
WARM_SECONDS, GRAPH_SECONDS = 0.004, 0.01  # of replays: layers are timed by the hundred, and keep the clocks up


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """The seconds of a call, the median of some.

    On a GPU calls are captured in a graph, so that what the host does in between does not count; what cannot be
    captured is timed with it.
    """
    with torch.no_grad():
        if device.type != "cuda":
            return _on_the_cpu(call)
        with torch.cuda.device(device):
            return _on_a_gpu(call)


def _on_the_cpu(call: Callable[[], object]) -> float:
    """Return the seconds of a call by PyTorch's threads; of a short one by one thread, where that takes less.

    On a busy machine threads wait for one another until the scheduler gives each its turn, which is tens of
    milliseconds of a call of microseconds, and says nothing about the call.
    """
    taken = on_the_clock(call, lambda: None)
    threads = torch.get_num_threads()
    if threads == 1 or taken > SLICE_SECONDS:
        return taken
    torch.set_num_threads(1)
    try:
        return min(taken, on_the_clock(call, lambda: None))
    finally:
        torch.set_num_threads(threads)


def _on_a_gpu(call: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        once = _warm_up(call, stream.synchronize)
        if _waits(call):
            return on_the_clock(call, torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        try:
            launches = max(1, min(LAUNCHES, int(SECONDS / once)))  # a slow call is timed by itself
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(launches):
                    call()
        except RuntimeError:
            _recover(stream)
            return on_the_clock(call, torch.cuda.synchronize)
        took, begun = 0.0, time.perf_counter()
        while not took or time.perf_counter() - begun < WARM_SECONDS:
            took = between(stream.cuda_stream, graph.replay, 1)[0]
        count = int(min(max(GRAPH_SECONDS / took, FEWEST), MOST))
        return statistics.median(between(stream.cuda_stream, graph.replay, count)) / launches


def _warm_up(call: Callable[[], object], wait: Callable[[], object]) -> float:
    """Call `WARM_UP` times, or as often as `LONG_SECONDS` allow; the seconds that the last call took."""
    begun = time.perf_counter()
    for _ in range(WARM_UP):
        start = time.perf_counter()
        call()
        wait()
        now = time.perf_counter()
        if now - begun > LONG_SECONDS:
            break
    return now - start


def _waits(call: Callable[[], object]) -> bool:
    """Whether a call waits for the GPU, which in a capture it must not; as far as PyTorch sees that."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the mode, that it is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            call()
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return False


def _recover(stream: torch.cuda.Stream) -> None:
    """Capture something that can be: what failed to be captured leaves random numbers in a state of capture."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        torch.zeros(1, device=stream.device)


def wake(call: Callable[[], object], device: torch.device) -> None:
    """Call for as long as an idle GPU takes to raise its clocks."""
    if device.type == "cuda":
        begun = time.perf_counter()
        while time.perf_counter() - begun < WAKE_SECONDS:
            call()
            torch.cuda.synchronize(device)


def wait_for(device: torch.device) -> Callable[[], None]:
    """What waits until a device has done all that was queued."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def on_the_clock(call: Callable[[], object], wait: Callable[[], None]) -> float:
    """Return the seconds of a call and of a wait: the lower quartile, as whatever disturbs a timing lengthens it."""
    _warm_up(call, wait)
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < MOST:
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
        enough = SECONDS if len(times) >= FEWEST and _is_steady(times) else LONG_SECONDS
        if time.perf_counter() - begun > enough:
            break
    return _quartiles(times)[0]


def _quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [*times] * 3
    return low, middle, high


def _is_steady(times: Sequence[float]) -> bool:
    low, middle, high = _quartiles(times)
    return high - low <= STEADY_SPREAD * middle
