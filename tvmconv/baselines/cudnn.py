"""Baseline `cudnn`: cuDNN through PyTorch."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tvmconv.baselines.base import Baseline, baseline, require_gpu, translate_library_errors
from tvmconv.baselines.torch_calls import Tensors, TorchConvCall, list_calls, to_tensor
from tvmconv.baselines.torch_gradient_calls import list_gradient_calls
from tvmconv.compiler.executable import ArrayType
from tvmconv.devices import sharing
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.devices.cuda.graphs import (
    IDLE_WARM_UP_SECONDS,
    GraphTimer,
    Replay,
    capture_until_long_enough,
    time_between_events,
    time_buffer_sets,
    warm_up,
)
from tvmconv.devices.device import BufferSets, Device, Timing
from tvmconv.errors import DeviceError
from tvmconv.optional_packages import format_install_command
from tvmconv.workloads import dtypes
from tvmconv.workloads.conv import Conv
from tvmconv.workloads.conv_gradient import DerivedConv
from tvmconv.workloads.filters import Filter

AnyConv = Conv | DerivedConv | Filter
# Picks before a turn at the GPU, by the number of the call and that of the algorithms.
PreparedPicks = dict[tuple[int, int | None], "CudnnPickThread"]

NEAR_RATIO = 1.15  # calls within this factor of the fastest are picked again
SLOW_RATIO = 1.5  # picks slower than the fastest by this factor are timed by one replay
FAR_RATIO = 3.0  # calls with a time by cuDNN's heuristics above this multiple of the fastest are not picked again
NUM_ALGORITHMS = (4, 8, 2, 3, 6, 10, 12, 16, 24, 0)  # algorithms that cuDNN tries, by round; 0: all
NUM_PREPARED = 4  # first rounds whose picks are made before a turn at a GPU that processes share
MAX_UNIMPROVED_ROUNDS = len(NUM_ALGORITHMS) + 2  # rounds without a faster pick after which picking ends
MIN_IMPROVEMENT = 0.01  # fraction by which a pick must be faster to count as an improvement
PICK_SECONDS, MIN_PICK_REPLAYS = 0.02, 5  # timing of each pick
MAX_PICKING_SECONDS = 3.0  # time after which picking ends by default; some calls have very many algorithms
WARM_UP_VALUES = 1 << 24  # float32 values of the warm-up kernel
MAX_IDLE_SECONDS = 0.2  # after a longer pause the GPU may have lowered its clocks
NUM_BUSY_LAUNCHES = 300  # launches of it, some 10 ms, that keep the clocks of a busy GPU steady before a trial


@baseline("cudnn", module="torch", takes_turns=True, checks_results=True)
def time_cudnn(
    w: AnyConv,
    inputs: Sequence[NDArray[Any]],
    *,
    device: Device,
    cold: bool = False,
    seconds: float = 0.5,
    picking_seconds: float = MAX_PICKING_SECONDS,
    is_right: Callable[[NDArray[Any]], bool] | None = None,
) -> Baseline:
    """Time PyTorch's convolution with cuDNN's fastest algorithm; only the dtype tf32 uses TF32.

    With `is_right`, it is the fastest algorithm whose result this function accepts: some are less exact than others.

    cuDNN selects an algorithm per thread by trials of single launches, and sometimes selects one that takes twice as
    long as another. All `list_calls` of the workload (both layouts, epilogue fused or not) are timed with the algorithm
    of such trials and with that of cuDNN's heuristics; if the latter takes `FAR_RATIO` times as long as that of another
    call, there are no trials. Calls within `NEAR_RATIO` of the fastest are picked again in new threads, until
    `MAX_UNIMPROVED_ROUNDS` rounds find no faster algorithm or `picking_seconds` have passed. Each round limits cuDNN's
    trials to another number of algorithms in the order of its heuristics. Fewer trials make it less likely that a slow
    algorithm wins by chance: on an H100, the fastest algorithm of a layer was picked in 0 of 24 trials of all
    algorithms, and in 4 of 8 trials of the first 2 to 6. The GPU is busy before each pick, so that the timing of a pick
    needs no further warm-up. The fastest pick is kept for `Baseline.time_again`, which times it in other memory each
    time, as our kernels are, and the description names it.

    If processes share the GPU, some picks of each call are made before the turn of this process, because cuDNN compiles
    and loads kernels for most of their time. They are timed in the turn. Their trials may have met kernels of other
    processes, so that all trials are repeated in the turn, as far as the time permits.

    The time includes kernels for parts of the workload that the call does not support, such as asymmetric padding or an
    unfused epilogue. It excludes conversions of the layout, except those of a mixed layout, which cuDNN does not have.
    """
    gpu = require_gpu(device, "cuDNN")
    torch = torch_with_cudnn()  # raises before threads are started
    prepared: PreparedPicks = {}
    try:
        with translate_library_errors("cuDNN through PyTorch", gpu, RuntimeError), torch.cuda.device(gpu.index):
            tensors = copy_to_gpu(inputs, gpu)
            if sharing.is_shared():
                prepared = prepare_picks(w, tensors, gpu, cold=cold)
            with sharing.hold_gpu():
                is_busy = time.monotonic() - CudnnPick.get_last_use(gpu) <= MAX_IDLE_SECONDS
                stream = torch.cuda.current_stream(gpu.index).cuda_stream
                warm_up_gpu(torch, gpu, stream, None if is_busy else IDLE_WARM_UP_SECONDS)
                fastest = pick_fastest(
                    *(w, tensors, gpu),
                    cold=cold,
                    picking_seconds=picking_seconds,
                    prepared=prepared,
                    is_right=is_right,
                )
                brief = Timing((fastest.seconds,), "CUDA graph, as picks are compared", cold)
                timing = fastest.time(seconds) if seconds else brief
        prepared = {key: pick for key, pick in prepared.items() if pick is not fastest}
    finally:
        for pick in prepared.values():
            pick.close()
        torch.cuda.empty_cache()  # PyTorch caches gigabytes per stream, which our kernels may need

    def close() -> None:
        fastest.close()
        torch.cuda.empty_cache()

    output = fastest.compute_output()
    return Baseline(
        timing,
        output,
        fastest.pick.description,
        time_again=fastest.time_elsewhere,
        close=close,
        open_timer=fastest.open_timer,
    )


def prepare_picks(w: AnyConv, tensors: Sequence[Any], gpu: CudaDevice, *, cold: bool) -> PreparedPicks:
    """Let cuDNN pick for all calls that it supports and that are not far slower, while others may use the GPU.

    cuDNN compiles and loads kernels meanwhile, which takes a processor some tenths of a second, and the GPU a few
    launches. The picks are not timed.
    """
    picks: PreparedPicks = {}
    launch_seconds: dict[int, float] = {}  # by number of the call
    for num_algorithms in (None, *NUM_ALGORITHMS[:NUM_PREPARED]):
        fastest = min(launch_seconds.values(), default=math.inf)
        for number, call in enumerate(_list_calls(w)):
            if launch_seconds.get(number, 0.0) > FAR_RATIO * fastest:
                continue
            with contextlib.suppress(DeviceError):  # that of a true pick is reported
                how = {"cold": cold, "num_algorithms": num_algorithms}
                picks[number, num_algorithms] = pick = CudnnPickThread(w, call, tensors, gpu, **how, has_gpu=False)
                launch_seconds.setdefault(number, pick.time_launch())
    return picks


def pick_fastest(
    w: AnyConv,
    tensors: Sequence[Any],
    gpu: CudaDevice,
    *,
    cold: bool,
    picking_seconds: float = MAX_PICKING_SECONDS,
    prepared: PreparedPicks | None = None,
    is_right: Callable[[NDArray[Any]], bool] | None = None,
) -> CudnnPickThread:
    """Return the fastest of cuDNN's picks for all calls, with repeated picks of calls near the fastest.

    `prepared` has picks of `prepare_picks`, which are timed first. Unsupported calls are skipped, and with `is_right`,
    picks whose results this function does not accept. It is called for picks that are faster than the fastest so far.

    Raises:
        DeviceError: No call is supported, with the reason of the first one, or no result is accepted.
    """
    errors: list[DeviceError] = []
    fastest: CudnnPickThread | None = None
    best_seconds: dict[int, float] = {}  # by number of the call
    calls_by_number = dict(enumerate(_list_calls(w)))

    def consider(number: int, candidate: CudnnPickThread) -> None:
        """Close the slower one of a pick and the fastest so far, or the pick if its result is wrong."""
        nonlocal fastest
        best_seconds[number] = min(candidate.seconds, best_seconds.get(number, candidate.seconds))
        slower: CudnnPickThread | None = candidate
        if (fastest is None or candidate.seconds < fastest.seconds) and has_right_result(candidate):
            fastest, slower = candidate, fastest
        if slower is not None:
            slower.close()

    def has_right_result(candidate: CudnnPickThread) -> bool:
        """Return whether the result of a pick is accepted, as is that of a call that is not verified."""
        output = candidate.compute_output() if is_right else None
        if is_right is None or output is None or is_right(output):
            return True
        errors.insert(0, DeviceError(f"wrong results of {candidate.pick.description}"))
        return False

    def try_pick(number: int, num_algorithms: int | None) -> None:
        """Let cuDNN pick once for a call."""
        call = calls_by_number[number]
        try:
            candidate = CudnnPickThread(w, call, tensors, gpu, cold=cold, num_algorithms=num_algorithms)
        except DeviceError as error:
            errors.append(error)
        else:
            consider(number, candidate)

    def require_fastest() -> CudnnPickThread:
        """Return the fastest pick, or raise the first error."""
        if fastest is None:
            raise errors[0]
        return fastest

    for (number, _), pick in (prepared or {}).items():
        try:
            pick.compare(fastest.seconds if fastest else math.inf)
        except DeviceError as error:
            errors.append(error)
            pick.close()
        else:
            consider(number, pick)
    for num_algorithms in (None, NUM_ALGORITHMS[0]):
        for number in calls_by_number:
            is_near = fastest is None or best_seconds.get(number, 0.0) <= FAR_RATIO * fastest.seconds
            if is_near and (number, num_algorithms) not in (prepared or {}):
                try_pick(number, num_algorithms)
    started_at, num_unimproved = time.monotonic(), 0  # the first picks, which load libraries, do not count
    first = 0 if prepared else 1  # the number of algorithms of the first round
    algorithm_counts = itertools.cycle([*NUM_ALGORITHMS[first:], *NUM_ALGORITHMS[:first]])
    while best_seconds and num_unimproved < MAX_UNIMPROVED_ROUNDS:
        previous_seconds, num_algorithms = fastest.seconds if fastest else math.inf, next(algorithm_counts)
        for number in [number for number, best in best_seconds.items() if best <= NEAR_RATIO * previous_seconds]:
            if time.monotonic() - started_at >= picking_seconds:
                return require_fastest()
            try_pick(number, num_algorithms)
        is_faster = fastest is not None and fastest.seconds < (1 - MIN_IMPROVEMENT) * previous_seconds
        num_unimproved = 0 if is_faster else num_unimproved + 1
    return require_fastest()


def load_library(device: Device) -> None:
    """Let cuDNN compute a small convolution and its gradients, because the first use of its parts loads them."""
    gpu, torch = require_gpu(device, "cuDNN"), torch_with_cudnn()
    with translate_library_errors("cuDNN through PyTorch", gpu, RuntimeError), torch.cuda.device(gpu.index):
        x, k = (torch.ones(shape, dtype=torch.float16, device=gpu.text) for shape in ((8, 64, 8, 8), (64, 64, 3, 3)))
        y = torch.nn.functional.conv2d(x, k)
        options = [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
        torch.ops.aten.convolution_backward(y, x, k, None, *options)
        torch.cuda.synchronize(gpu.index)


def _list_calls(w: AnyConv) -> list[TorchConvCall]:
    return list_gradient_calls(w) if isinstance(w, DerivedConv) else list_calls(w)


def copy_to_gpu(inputs: Sequence[NDArray[Any]], gpu: CudaDevice) -> list[Any]:
    """Return arrays as tensors of a GPU, from which each pick copies its own faster than from the host."""
    tensors = [_make_own_copy(array, gpu) for array in inputs]
    torch_with_cudnn().cuda.synchronize(gpu.index)  # picks read them on streams of their own
    return tensors


def _make_own_copy(value: Any, gpu: CudaDevice) -> Any:
    """Return an array, or a copy of a tensor, as a tensor of a GPU."""
    return to_tensor(value).to(gpu.text) if isinstance(value, np.ndarray) else value.clone()


def warm_up_gpu(torch: Any, gpu: CudaDevice, stream: int, seconds: float | None = None) -> None:
    """Keep a GPU busy until its clocks are steady, because cuDNN's trials are unreliable at low clocks."""
    values = torch.zeros(WARM_UP_VALUES, device=gpu.text)
    warm_up(lambda: values.add_(1.0), stream, seconds)


def keep_gpu_busy(torch: Any, gpu: CudaDevice) -> None:
    """Queue some milliseconds of work on the current stream of a GPU that was busy a moment ago."""
    values = torch.zeros(WARM_UP_VALUES, device=gpu.text)
    for _ in range(NUM_BUSY_LAUNCHES):
        values.add_(1.0)


class CudnnPickThread:
    """A thread with one pick of cuDNN, which caches its picks per thread; the arguments are those of `CudnnPick`."""

    def __init__(self, *arguments: Any, has_gpu: bool = True, **how: Any) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self.seconds = math.inf  # by which picks are compared; infinite until `compare`
        try:
            self.pick = self._thread.submit(CudnnPick, *arguments, has_gpu=has_gpu, **how).result()
            if has_gpu:
                self.compare()
        except BaseException:
            self._thread.shutdown()
            raise

    def compare(self, best_seconds: float = math.inf) -> None:
        """Time the pick for the comparison with others, the fastest of which takes `best_seconds`."""
        self.seconds = self._thread.submit(self.pick.time_briefly, best_seconds).result()

    def time_launch(self) -> float:
        """Return the seconds of one launch, without a warm-up."""
        return self._thread.submit(self.pick.time_launch).result()

    def time(self, seconds: float) -> Timing:
        """Time the pick for about `seconds`."""
        return self._thread.submit(self.pick.time, seconds).result()

    def time_elsewhere(self, seconds: float) -> Timing:
        """Time the pick in tensors that were not used before if their location may matter."""
        self._thread.submit(self.pick.move_tensors).result()
        return self.time(seconds)

    @contextmanager
    def open_timer(self) -> Iterator[PickTimer]:
        """Open a timer of turns, in tensors that were not used before if their location may matter."""
        self._thread.submit(self.pick.move_tensors).result()
        yield PickTimer(self._thread, self.pick, self._thread.submit(self.pick.start_timer).result())

    def compute_output(self) -> NDArray[Any] | None:
        """Return Y as the pick computes it; None if the call is not verified."""
        return self._thread.submit(self.pick.compute_output).result()

    def close(self) -> None:
        """End the thread and free the tensors of the pick."""
        self._thread.shutdown()
        self.pick.close()


@dataclass(frozen=True)
class PickTimer:
    """Timer of a pick in turns, in its thread."""

    thread: ThreadPoolExecutor
    pick: CudnnPick
    timer: GraphTimer

    def take_turn(self, seconds: float, *, counts: bool = True) -> None:
        """Time launches for about these seconds; the times count if `counts`."""
        self.thread.submit(self.pick.take_turn, self.timer, seconds, counts).result()

    def finish(self) -> Timing:
        """Return the times of all turns."""
        return self.timer.finish()


class CudnnPick:
    """A call of PyTorch's convolution with the algorithm that cuDNN picks for it in this thread.

    cuDNN tries `num_algorithms` algorithms in the order of its heuristics, all of them for 0. For None, it takes the
    choice of its heuristics without trials. Before, the GPU is kept busy if `has_gpu`: no other process uses it.
    """

    _busy_until: ClassVar[dict[int, float]] = {}  # when the last timing of a pick ended, by GPU

    def __init__(
        self,
        w: AnyConv,
        call: TorchConvCall,
        inputs: Sequence[Any],
        gpu: CudaDevice,
        *,
        cold: bool,
        num_algorithms: int | None = 0,
        has_gpu: bool = True,
    ) -> None:
        torch = torch_with_cudnn()
        self._num_algorithms = num_algorithms
        self._torch, self._gpu, self._call = torch, gpu, call
        self._tf32 = w.dtype == dtypes.TF32.name
        nbytes = sum(x.nbytes for x in inputs) + ArrayType(w.argument_shapes[-1], w.argument_dtypes[-1]).nbytes
        self._sets = BufferSets.choose_count(nbytes, gpu.l2_bytes or 0, cold=cold)
        self._stream = torch.cuda.Stream(gpu.index)
        algorithm = "algorithm by heuristics" if num_algorithms is None else "best algorithm"
        tf32 = "TF32" if self._tf32 else "no TF32"
        self.description = ", ".join([*_format_versions(torch), algorithm, tf32, *call.notes])
        with self._on_stream():
            self._copies = [call.prepare(*(_make_own_copy(x, gpu) for x in inputs)) for _ in range(self._sets.num_sets)]
            if has_gpu and time.monotonic() - self.get_last_use(gpu) > MAX_IDLE_SECONDS:
                warm_up_gpu(torch, gpu, self._stream.cuda_stream)
            elif has_gpu:
                keep_gpu_busy(torch, gpu)
            for _ in range(3):  # the first call tries the algorithms, which is not allowed in a capture
                call.compute(*self._copies[0])
        self._previous_copies: list[Tensors] = []  # keep their memory from being used again

    @classmethod
    def get_last_use(cls, gpu: CudaDevice) -> float:
        """Return the `time.monotonic` at which the last timing of a pick, or turn of a process, ended on a GPU."""
        return max(cls._busy_until.get(gpu.index, -math.inf), sharing.get_last_use())

    def compute_output(self) -> NDArray[Any] | None:
        """Return Y, or None if the call is not verified; only in the thread that created this object."""
        if not self._call.is_verified:
            return None
        with self._on_stream():
            output: NDArray[Any] = self._call.finish(self._call.compute(*self._copies[0])).cpu().float().numpy()
            return output

    def move_tensors(self) -> None:
        """Move the inputs to other memory if `Device.is_location_relevant`; outputs are allocated for each timing."""
        if self._sets.num_sets > 1 or not self._gpu.is_location_relevant(self._sets.set_bytes):
            return
        with self._on_stream():
            moved = tuple(value.clone() if self._torch.is_tensor(value) else value for value in self._copies[0])
            self._previous_copies.append(self._copies[0])
            self._copies[0] = moved

    def time(self, seconds: float) -> Timing:
        """Time the call like kernels, for about `seconds`; only in the thread that created this object."""
        with self._on_stream():
            timing = time_buffer_sets(self._capture, self._stream.cuda_stream, self._sets, seconds)
        self._busy_until[self._gpu.index] = time.monotonic()
        return timing

    def start_timer(self) -> GraphTimer:
        """Return a timer of turns; only in the thread that created this object."""
        with self._on_stream():
            return GraphTimer(self._capture, self._stream.cuda_stream, self._sets)

    def take_turn(self, timer: GraphTimer, seconds: float, counts: bool) -> None:
        """Time launches by a timer of `start_timer` for about these seconds; likewise in one thread."""
        with self._on_stream():  # a graph is replayed on the current stream
            timer.take_turn(seconds, counts=counts)

    def time_launch(self) -> float:
        """Return the seconds of one launch, without a warm-up; likewise in one thread."""
        with self._on_stream():
            (seconds,) = time_between_events(self._stream.cuda_stream, lambda: self._call.compute(*self._copies[0]), 1)
        return seconds

    def time_briefly(self, best_seconds: float = math.inf) -> float:
        """Return the median seconds of a launch for `PICK_SECONDS`, without a warm-up; likewise in one thread.

        Picks whose first replay is slower than the best one by `SLOW_RATIO` are not timed further.
        """
        stream = self._stream.cuda_stream
        with self._on_stream():
            replay, launches = capture_until_long_enough(self._capture, stream, launch_multiple=self._sets.num_sets)
            samples = time_between_events(stream, replay, 1)
            if samples[0] < PICK_SECONDS and samples[0] / launches <= SLOW_RATIO * best_seconds:
                samples = time_between_events(stream, replay, max(MIN_PICK_REPLAYS, int(PICK_SECONDS / samples[0])))
        self._busy_until[self._gpu.index] = time.monotonic()
        return statistics.median(samples) / launches

    def _capture(self, launches: int) -> Replay:
        """Return a function that replays a graph of launches. With a hot cache, consecutive outputs reuse the same
        memory. With a cold one, each set has its own output.
        """
        graph, num_sets = self._torch.cuda.CUDAGraph(), self._sets.num_sets
        outputs: list[Any] = [None] * num_sets
        with self._torch.cuda.graph(graph, stream=self._stream):
            for i in range(launches):
                outputs[i % num_sets] = None
                outputs[i % num_sets] = self._call.compute(*self._copies[i % num_sets])
        replay: Replay = graph.replay
        return replay

    def close(self) -> None:
        """Free the tensors."""
        self._copies.clear()
        self._previous_copies.clear()

    def _on_stream(self) -> AbstractContextManager[None]:
        tf32, num_algorithms = self._tf32, self._num_algorithms
        return compute_on_stream(self._torch, self._gpu, self._stream, allow_tf32=tf32, num_algorithms=num_algorithms)


def torch_with_cudnn() -> Any:
    """Return the PyTorch module; raises `DeviceError` if it is missing or has no cuDNN."""
    try:
        import torch
    except ImportError as error:
        raise DeviceError(f"the cuDNN baseline needs PyTorch: {format_install_command('torch')}") from error
    if not torch.cuda.is_available() or not torch.backends.cudnn.is_available():
        raise DeviceError(
            f"PyTorch {torch.__version__} has no CUDA device with cuDNN: install a build for CUDA from pytorch.org"
        )
    return torch


@contextmanager
def configure_cudnn(torch: Any, *, allow_tf32: bool, num_algorithms: int | None = 0) -> Iterator[None]:
    """Set cuDNN's options in the block: TF32, and the number of algorithms to try (0 for all, None for none)."""
    settings = (
        (torch.backends.cudnn, "benchmark", num_algorithms is not None),
        (torch.backends.cudnn, "benchmark_limit", num_algorithms or 0),
        (torch.backends.cudnn, "allow_tf32", allow_tf32),
        (torch.backends.cuda.matmul, "allow_tf32", allow_tf32),
    )
    previous_values = [getattr(owner, name) for owner, name, _ in settings]
    for owner, name, value in settings:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(settings, previous_values, strict=True):
            setattr(owner, name, value)


@contextmanager
def compute_on_stream(
    torch: Any, gpu: CudaDevice, stream: Any, *, allow_tf32: bool, num_algorithms: int | None = 0
) -> Iterator[None]:
    """Compute on a stream with the settings of `configure_cudnn`, and translate the library's errors."""
    with (
        translate_library_errors("cuDNN through PyTorch", gpu, RuntimeError),
        torch.cuda.device(gpu.index),
        torch.cuda.stream(stream),
        torch.no_grad(),
        configure_cudnn(torch, allow_tf32=allow_tf32, num_algorithms=num_algorithms),
    ):
        yield


def _format_versions(torch: Any) -> tuple[str, str]:
    version = torch.backends.cudnn.version()  # 91900 is 9.19.0; before cuDNN 9, 8907 was 8.9.7
    major, remainder = divmod(version, 10_000 if version >= 90_000 else 1000)
    return f"cuDNN {major}.{remainder // 100}", f"PyTorch {torch.__version__}"
