"""cuDNN, through PyTorch: the convolution that most people run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tvmconv.baselines.base import Baseline, baseline, require_gpu, translate_library_errors
from tvmconv.baselines.torch_calls import TorchConvCall, list_calls, to_tensor
from tvmconv.devices.cuda.graphs import IDLE_WARM_UP_SECONDS, Replay, time_buffer_sets, warm_up
from tvmconv.devices.device import BufferSets, Device, sum_buffer_bytes
from tvmconv.errors import DeviceError
from tvmconv.optional_packages import format_install_command
from tvmconv.workloads import dtypes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.devices.cuda.device import CudaDevice
    from tvmconv.devices.device import Timing
    from tvmconv.workloads.conv import Conv
    from tvmconv.workloads.filters import Filter


NEAR_RATIO = 1.15  # times as slow as the fastest call is one that is asked again: another pick may be the fastest
NUM_ALGORITHMS = (0, 2, 3, 4, 6, 8, 10, 12, 16, 24)  # that cuDNN tries, in rounds of picks in turn; 0: all of them
MAX_UNIMPROVED_ROUNDS = 4 * len(NUM_ALGORITHMS)  # of picks, after which no better one is expected
MIN_IMPROVEMENT = 0.01  # of the time, by which a pick is better than those before it
PICK_SECONDS = 0.04  # for which each pick is timed
MAX_PICKING_SECONDS = 8.0  # after which there are no further picks: some calls have very many algorithms to try
WARM_UP_VALUES = 1 << 24  # float32 values that an idle GPU adds to until its clocks are up


@baseline("cudnn")
def time_cudnn(
    w: Conv | Filter, inputs: Sequence[NDArray[Any]], *, device: Device, cold: bool = False, seconds: float = 0.5
) -> Baseline:
    """Time PyTorch's convolution with cuDNN's fastest algorithm, and with TF32 for the dtype of that name alone.

    cuDNN tries its algorithms on single launches, and at times picks one that is half as fast as another. It remembers
    its picks by thread. Each of the workload's `list_calls`, in the one or the other layout, with the epilogue in
    cuDNN's kernel or not, is timed with the algorithm that is fastest in these trials, and with the one that cuDNN's
    heuristics choose. Calls within `NEAR_RATIO` of the fastest are tried again in fresh threads, until
    `MAX_UNIMPROVED_ROUNDS` rounds bring no faster pick, or `MAX_PICKING_SECONDS` have passed. From round to round cuDNN
    tries another number of its algorithms, the first ones by its heuristics: the fewer it tries, the less often a slow
    one wins by chance. On an H100, the fastest algorithm of a layer was picked in 0 of 24 trials of all algorithms, and
    in 4 of 8 trials of the first 2 to
    6. The GPU is warmed up before each trial. The fastest pick is kept to be timed again (`Baseline.time_again`), and
    the text tells which it was.

    What a workload has that the call does not, a padding of two unlike sides or an epilogue that is not fused, is a
    kernel of its own, in the time. To bring tensors to another layout is not.

    Args:
        w: the workload.
        inputs: all arguments but Y, of `w.argument_shapes` and `w.argument_dtypes`.
        device: an NVIDIA GPU.
        cold: as for `LoadedKernel.time`.
        seconds: as for `LoadedKernel.time`.

    Raises:
        UnsupportedDeviceError: `device` is no NVIDIA GPU.
        DeviceError: PyTorch with cuDNN is missing, or it fails.
    """
    gpu = require_gpu(device, "cuDNN")
    torch = torch_with_cudnn()  # missing, it is missed before threads are started
    try:
        with translate_library_errors("cuDNN through PyTorch", gpu, RuntimeError), torch.cuda.device(gpu.index):
            warm_up_gpu(torch, gpu, torch.cuda.current_stream(gpu.index).cuda_stream, IDLE_WARM_UP_SECONDS)
        fastest = pick_fastest(w, inputs, gpu, cold=cold)
        timing = fastest.time(seconds)
    finally:
        torch.cuda.empty_cache()  # PyTorch keeps memory for each stream, gigabytes that our own kernels may need
    pick = fastest.pick

    def close() -> None:
        fastest.close()
        torch.cuda.empty_cache()

    return Baseline(timing, pick.output, pick.description, time_again=fastest.time, close=close)


def pick_fastest(w: Conv | Filter, inputs: Sequence[NDArray[Any]], gpu: CudaDevice, *, cold: bool) -> CudnnPickThread:
    """Return the fastest of the algorithms that cuDNN picks for each call, and again for those near the fastest.

    Calls that it cannot run are left out. Raises the first one's DeviceError if it can run none.
    """
    errors: list[DeviceError] = []
    fastest: CudnnPickThread | None = None
    best_seconds: dict[int, float] = {}  # of each call that runs, by its number
    calls_by_number = dict(enumerate(list_calls(w)))

    def try_pick(number: int, num_algorithms: int | None) -> None:
        """Have one more pick for a call; of it and the fastest one so far the slower one is closed."""
        nonlocal fastest
        call = calls_by_number[number]
        try:
            candidate = CudnnPickThread(w, call, inputs, gpu, cold=cold, num_algorithms=num_algorithms)
        except DeviceError as error:
            errors.append(error)
            return
        median = candidate.timing.median
        best_seconds[number] = min(median, best_seconds.get(number, median))
        if fastest is None or median < fastest.timing.median:
            fastest, candidate = candidate, fastest
        if candidate is not None:
            candidate.close()

    for num_algorithms in (0, None):
        for number in calls_by_number:
            try_pick(number, num_algorithms)
    started_at, num_unimproved = time.monotonic(), 0  # not before: the first picks load libraries
    algorithm_counts = itertools.cycle([*NUM_ALGORITHMS[1:], NUM_ALGORITHMS[0]])
    while fastest is not None and num_unimproved < MAX_UNIMPROVED_ROUNDS:
        previous_median, num_algorithms = fastest.timing.median, next(algorithm_counts)
        for number in [number for number, best in best_seconds.items() if best <= NEAR_RATIO * previous_median]:
            if time.monotonic() - started_at >= MAX_PICKING_SECONDS:
                return fastest
            try_pick(number, num_algorithms)
        num_unimproved = 0 if fastest.timing.median < (1 - MIN_IMPROVEMENT) * previous_median else num_unimproved + 1
    if fastest is None:
        raise errors[0]
    return fastest


def warm_up_gpu(torch: Any, gpu: CudaDevice, stream: int, seconds: float | None = None) -> None:
    """Keep a GPU busy until its clocks are steady: cuDNN's trials on low clocks say little.

    Args:
        torch: PyTorch.
        gpu: the GPU.
        stream: PyTorch's current stream there.
        seconds: how long at least, as for `graphs.warm_up`.
    """
    values = torch.zeros(WARM_UP_VALUES, device=gpu.text)
    warm_up(lambda: values.add_(1.0), stream, seconds)


class CudnnPickThread:
    """What cuDNN picks in a thread of its own: it remembers its picks by thread.

    Args:
        w: the workload.
        call: how it is computed.
        inputs: as for `time_cudnn`.
        gpu: where.
        cold: as for `LoadedKernel.time`.
        num_algorithms: as for `CudnnPick`.

    Attributes:
        call: how it is computed.
        pick: what cuDNN picked.
        timing: of `PICK_SECONDS`, by which picks are compared with each other.

    Raises:
        DeviceError: PyTorch with cuDNN is missing, or it fails.
    """

    def __init__(
        self,
        w: Conv | Filter,
        call: TorchConvCall,
        inputs: Sequence[NDArray[Any]],
        gpu: CudaDevice,
        *,
        cold: bool,
        num_algorithms: int | None = 0,
    ) -> None:
        self.call = call
        self._thread = ThreadPoolExecutor(max_workers=1)
        try:
            self.pick = self._thread.submit(
                CudnnPick, w, call, inputs, gpu, cold=cold, num_algorithms=num_algorithms
            ).result()
            self.timing = self.time(PICK_SECONDS)
        except BaseException:
            self._thread.shutdown()
            raise

    def time(self, seconds: float) -> Timing:
        """Time it for about so many seconds."""
        return self._thread.submit(self.pick.time, seconds).result()

    def close(self) -> None:
        """End the thread and free the tensors."""
        self._thread.shutdown()
        self.pick.close()


class CudnnPick:
    """A call of PyTorch's convolution, with the algorithm that cuDNN has picked for it in this thread.

    Args:
        w: the workload.
        call: how it is computed.
        inputs: as for `time_cudnn`.
        gpu: where.
        cold: as for `LoadedKernel.time`.
        num_algorithms: how many of its algorithms cuDNN tries, the first by its heuristics, 0 for all; None to take
            what its heuristics choose without a trial.

    Attributes:
        output: what it computes.
        description: what it runs: the library, its version, its settings.

    Raises:
        DeviceError: PyTorch with cuDNN is missing, or it fails.
    """

    def __init__(
        self,
        w: Conv | Filter,
        call: TorchConvCall,
        inputs: Sequence[NDArray[Any]],
        gpu: CudaDevice,
        *,
        cold: bool,
        num_algorithms: int | None = 0,
    ) -> None:
        torch = torch_with_cudnn()
        self._num_algorithms = num_algorithms
        self._torch, self._gpu, self._call = torch, gpu, call
        self._tf32 = w.dtype == dtypes.TF32.name
        nbytes = sum_buffer_bytes(inputs, w.argument_shapes[-1], w.storage)
        self._sets = BufferSets.choose_count(nbytes, gpu.l2_bytes or 0, cold=cold)
        self._stream = torch.cuda.Stream(gpu.index)
        settings = (
            "algorithm by heuristics" if num_algorithms is None else "best algorithm",
            "TF32" if self._tf32 else "no TF32",
        )
        self.description = ", ".join([*_format_versions(torch), *settings, *call.notes])
        with self._on_stream():
            self._copies = [
                call.prepare(*(to_tensor(array).to(gpu.text) for array in inputs)) for _ in range(self._sets.num_sets)
            ]
            if num_algorithms is not None:
                warm_up_gpu(torch, gpu, self._stream.cuda_stream)
            for _ in range(3):  # the first call tries the algorithms, which a capture does not allow
                output = call.compute(*self._copies[0])
            self.output = call.finish(output).float().cpu().numpy()
            del output

    def time(self, seconds: float) -> Timing:
        """Time it as kernels are timed, for about so many seconds; in the thread that it was made in."""
        torch, sets, stream = self._torch, self._sets, self._stream

        def capture(launches: int) -> Replay:
            graph = torch.cuda.CUDAGraph()
            # Hot: each output is freed at once and the next takes its place. Cold: each set has an output.
            outputs: list[Any] = [None] * sets.num_sets
            with torch.cuda.graph(graph, stream=stream):
                for i in range(launches):
                    outputs[i % sets.num_sets] = None
                    outputs[i % sets.num_sets] = self._call.compute(*self._copies[i % sets.num_sets])
            return graph.replay

        with self._on_stream():
            return time_buffer_sets(capture, stream.cuda_stream, sets, seconds)

    def close(self) -> None:
        """Free the tensors."""
        self._copies.clear()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """PyTorch's settings, on the pick's stream, with errors that name the library."""
        torch = self._torch
        with (
            translate_library_errors("cuDNN through PyTorch", self._gpu, RuntimeError),
            torch.cuda.device(self._gpu.index),
            torch.cuda.stream(self._stream),
            torch.no_grad(),
            configure_cudnn(torch, allow_tf32=self._tf32, num_algorithms=self._num_algorithms),
        ):
            yield


def time_pick(
    w: Conv | Filter,
    call: TorchConvCall,
    inputs: Sequence[NDArray[Any]],
    gpu: CudaDevice,
    *,
    cold: bool,
    seconds: float,
) -> Baseline:
    """Let cuDNN try its algorithms in this thread, and time the one that it picks, once.

    Args:
        w: the workload.
        call: how it is computed.
        inputs: as for `time_cudnn`.
        gpu: where.
        cold: as for `LoadedKernel.time`.
        seconds: as for `LoadedKernel.time`.

    Raises:
        DeviceError: PyTorch with cuDNN is missing, or it fails.
    """
    pick = CudnnPick(w, call, inputs, gpu, cold=cold)
    return Baseline(pick.time(seconds), pick.output, pick.description)


def torch_with_cudnn() -> Any:
    """PyTorch; raises `DeviceError` where it is missing, or has no cuDNN."""
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
    """Let cuDNN try so many algorithms, 0 for all, None for none, and round to TF32 only where that is asked."""
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


def _format_versions(torch: Any) -> tuple[str, str]:
    version = torch.backends.cudnn.version()  # 91900 is 9.19.0, and before cuDNN 9 8907 was 8.9.7
    major, remainder = divmod(version, 10_000 if version >= 90_000 else 1000)
    return f"cuDNN {major}.{remainder // 100}", f"PyTorch {torch.__version__}"
