"""Timing of PyTorch calls: CUDA graphs between events on a GPU, wall-clock time elsewhere; and a cache of times."""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tvmconv import jsonfile
from tvmconv.checksummed_file import read_checked, write_checked
from tvmconv.devices import sharing
from tvmconv.devices.cuda.graphs import time_between_events
from tvmconv.jsonfile import JsonError
from tvmconv.measure import kernel_cache
from tvmconv.torch.layer import is_tf32_allowed
from tvmconv.torch.model import Optimized

NUM_WARM_UP_CALLS = 3
TIMING_SECONDS = 0.05  # duration of one timing
MAX_TIMING_SECONDS = 0.5  # limit of a warm-up, and of the samples of a slow call
MIN_SAMPLES, MAX_SAMPLES = 5, 200
SLICE_SECONDS = 0.1  # waiting for scheduler time slices does not explain a longer call
STEADY_SPREAD = 0.2  # largest interquartile range relative to the median; beyond it more samples are taken
# Calls in one CUDA graph: as many as take this long from Python. The GPU then takes longer than the launch of a graph,
# which on a busy host takes tens of microseconds.
GRAPH_CALL_SECONDS, MAX_CALLS_PER_GRAPH = 0.005, 50
WAKE_SECONDS = 0.1  # an idle GPU takes as long to raise its clocks
WARM_SECONDS, GRAPH_SECONDS = 0.004, 0.01  # duration of replays; short, as timings of many layers keep clocks high


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call on PyTorch's device in seconds.

    On a GPU, calls are captured in a CUDA graph, which excludes the time of the host between launches. A call that
    cannot be captured is timed with that time included.
    """
    with torch.no_grad():
        if device.type != "cuda":
            return _time_on_cpu(call)
        with torch.cuda.device(device), sharing.hold_gpu():
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
            num_calls = max(1, min(MAX_CALLS_PER_GRAPH, int(GRAPH_CALL_SECONDS / warm_seconds)))
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(num_calls):
                    call()
        except RuntimeError:
            # A failed capture leaves the random number generator in a capturing state, which a valid capture ends.
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                torch.zeros(1, device=stream.device)
            return time_wall_clock(call, torch.cuda.synchronize)
        replay_seconds, started_at = 0.0, time.perf_counter()
        while not replay_seconds or time.perf_counter() - started_at < WARM_SECONDS:
            replay_seconds = time_between_events(stream.cuda_stream, graph.replay, 1)[0]
        count = int(min(max(GRAPH_SECONDS / replay_seconds, MIN_SAMPLES), MAX_SAMPLES))
        return statistics.median(time_between_events(stream.cuda_stream, graph.replay, count)) / num_calls


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


def make_waiter(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until a device has finished all queued work."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def time_wall_clock(call: Callable[[], object], wait_for_device: Callable[[], None]) -> float:
    """Return the lower quartile of the seconds of a call and a wait, because disturbances only lengthen a timing."""
    _warm_up(call, wait_for_device)
    times: list[float] = []
    started_at = time.perf_counter()
    while len(times) < MAX_SAMPLES:
        start = time.perf_counter()
        call()
        wait_for_device()
        times.append(time.perf_counter() - start)
        low, middle, high = np.percentile(times, (25, 50, 75))
        is_steady = len(times) >= MIN_SAMPLES and high - low <= STEADY_SPREAD * middle
        if time.perf_counter() - started_at > (TIMING_SECONDS if is_steady else MAX_TIMING_SECONDS):
            break
    return float(low)


@contextlib.contextmanager
def use_cudnn_heuristics() -> Iterator[None]:
    """Have cuDNN choose algorithms by heuristics; trying them would take seconds for a network."""
    previous = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = previous


class CallTimingCache:
    """Times of calls by name, which are measured once and kept on disk for the choice in later runs.

    The file is in the folder of the kernel cache. Its name is a hash of the given key, the device's name, the sources
    of this package, the versions of PyTorch and cuDNN, and the settings that decide what PyTorch runs.
    """

    def __init__(self, key: Sequence[Any], torch_device: torch.device, device_name: str) -> None:
        self._torch_device = torch_device
        self.is_awake = False  # false after the GPU was idle and may have lowered its clocks
        self._seconds_by_name: dict[str, float] = {}
        self._has_new = False
        folder = kernel_cache.find_cache_folder()
        self._file = folder and folder / f"times-{_hash_settings(key, device_name)}.json"
        content = read_checked(self._file) if self._file else None
        if content is not None:
            with contextlib.suppress(JsonError):
                cached_seconds = jsonfile.parse_json(content).decode(dict[str, float])
                self._seconds_by_name = {key: seconds for key, seconds in cached_seconds.items() if seconds > 0}

    def get_seconds(self, name: str, call: Callable[[], object]) -> float:
        """Return the seconds of a call from the cache by its name, or measure them."""
        if name not in self._seconds_by_name:
            self.measure(name, call)
        return self._seconds_by_name[name]

    def has_seconds(self, name: str) -> bool:
        """Return whether the cache has the seconds of a call."""
        return name in self._seconds_by_name

    def add(self, name: str, seconds: float) -> None:
        """Add the seconds of a call that were measured elsewhere."""
        self._seconds_by_name[name], self._has_new = seconds, True

    def measure(self, name: str, call: Callable[[], object]) -> float:
        """Measure the seconds of a call, also if the cache has them, and return them."""
        if not self.is_awake and self._torch_device.type == "cuda":
            started_at = time.perf_counter()
            while time.perf_counter() - started_at < WAKE_SECONDS:
                self.wake(call)
                torch.cuda.synchronize(self._torch_device)
        self.is_awake = self._has_new = True
        self._seconds_by_name[name] = time_call(call, self._torch_device)
        return self._seconds_by_name[name]

    def wake(self, call: Callable[[], object]) -> None:
        """Give the GPU work before the call is timed."""
        call()

    def save(self) -> None:
        """Write new times to the file, if the cache has a folder."""
        if self._has_new and self._file:
            write_checked(self._file, json.dumps(self._seconds_by_name, indent=0).encode())


class TimingCache(CallTimingCache):
    """Times of a model's parts by name; the file depends on the model's graphs and shapes, and on its arguments."""

    def __init__(
        self, model: Optimized, arguments: Sequence[Any], torch_device: torch.device, device_name: str
    ) -> None:
        self._model, self._arguments = model, arguments
        tensors = [*model.state_dict().items(), *((str(number), value) for number, value in enumerate(arguments))]
        tensor_keys = [
            (key, str(value.dtype), tuple(value.shape), value.stride())
            for key, value in tensors
            if isinstance(value, torch.Tensor) and value.layout is torch.strided
        ]
        name = type(model.original).__qualname__
        super().__init__([name, str(model), model.graph_code(), tensor_keys], torch_device, device_name)

    def wake(self, call: Callable[[], object]) -> None:
        """Run the whole model, because a call of a small part would not raise the clocks."""
        self._model(*self._arguments)


def _hash_settings(key: Sequence[Any], device_name: str) -> str:
    """Return a hash of a key and of everything else that decides what PyTorch runs, and how fast."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""
    cudnn = torch.backends.cudnn
    pytorch_settings = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, is_tf32_allowed(), autocast)
    versions = (torch.__version__, cudnn.version(), kernel_cache.hash_sources())
    return hashlib.sha256(json.dumps([*key, device_name, pytorch_settings, versions], default=str).encode()).hexdigest()
