"""cuDNN, through PyTorch: the convolution that most people run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tvmconv.baselines.base import Baseline, baseline, border_of, check_gpu
from tvmconv.baselines.torch_calls import Call, calls, tensor
from tvmconv.devices.base import BufferSets, Device, set_bytes
from tvmconv.devices.cuda.graphs import Replay, time_sets
from tvmconv.errors import DeviceError
from tvmconv.extras import how_to_install
from tvmconv.workloads import dtypes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.devices.cuda.device import CudaDevice
    from tvmconv.workloads.conv import Conv
    from tvmconv.workloads.filters import Filter


PICKS = 3
PICKING_SECONDS = 6.0  # after which it is not asked for another pick: some calls have very many algorithms to try


@baseline("cudnn")
def time_cudnn(
    w: Conv | Filter, inputs: Sequence[NDArray[Any]], *, device: Device, cold: bool = False, seconds: float = 0.5
) -> Baseline:
    """Time PyTorch's convolution with cuDNN's fastest algorithm, and with TF32 for the dtype of that name alone.

    cuDNN tries its algorithms on trials of microseconds, and at times picks one that is half as fast as another. It
    remembers its picks by thread. Where there are several `calls` of the workload, in the one or the other layout, with
    the epilogue in its own kernel or not, it is asked for each, and for the fastest in `PICKS` threads, though not
    again after `PICKING_SECONDS`. The fastest counts, and the text tells which it was.

    What a workload has that the call does not, a padding of two unlike sides or an epilogue that is not fused, is a
    kernel of its own, in the time. To bring tensors to another layout is not.

    Args:
        w: the workload.
        inputs: all arguments but Y, of `w.argument_shapes` and `w.argument_dtypes`.
        device: an NVIDIA GPU.
        cold: as for `Loaded.time`.
        seconds: as for `Loaded.time`.

    Raises:
        WrongDeviceError: `device` is no NVIDIA GPU.
        DeviceError: PyTorch with cuDNN is missing, or it fails.
    """
    gpu = check_gpu(device, "cuDNN")
    torch = torch_with_cudnn()  # missing, it is missed before threads are started
    try:
        return min(_picks(w, inputs, gpu, cold=cold, seconds=seconds), key=lambda pick: pick.timing.median)
    finally:
        torch.cuda.empty_cache()  # PyTorch keeps memory for each stream, gigabytes that our own kernels may need


def _picks(
    w: Conv | Filter, inputs: Sequence[NDArray[Any]], gpu: CudaDevice, *, cold: bool, seconds: float
) -> Iterator[Baseline]:
    """What cuDNN picks for each call, and what else for the fastest one.

    Calls that it cannot run are left out, unless it can run none.
    """

    def picked(call: Call) -> Baseline:
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(time_pick, w, call, inputs, gpu, cold=cold, seconds=seconds).result()

    errors, begun = [], time.monotonic()
    found: list[tuple[float, Call]] = []
    for call in calls(w):
        try:
            pick = picked(call)
        except DeviceError as error:
            errors.append(error)
            continue
        found.append((pick.timing.median, call))
        yield pick
    if not found:
        raise errors[0]
    _, fastest = min(found, key=lambda one: one[0])
    for _ in range(PICKS - 1):
        if time.monotonic() - begun < PICKING_SECONDS:
            yield picked(fastest)


def time_pick(
    w: Conv | Filter, call: Call, inputs: Sequence[NDArray[Any]], gpu: CudaDevice, *, cold: bool, seconds: float
) -> Baseline:
    """Let cuDNN try its algorithms, and time the one that it picks.

    Args:
        w: the workload.
        call: how it is computed.
        inputs: as for `time_cudnn`.
        gpu: where.
        cold: as for `Loaded.time`.
        seconds: as for `Loaded.time`.

    Raises:
        DeviceError: PyTorch with cuDNN is missing, or it fails.
    """
    torch = torch_with_cudnn()
    tf32 = w.dtype == dtypes.TF32.name
    sets = BufferSets.choose(set_bytes(inputs, w.argument_shapes[-1], w.storage), gpu.l2_bytes or 0, cold=cold)
    stream = torch.cuda.Stream(gpu.index)
    with (
        border_of("cuDNN through PyTorch", gpu, RuntimeError),
        torch.cuda.device(gpu.index),
        torch.cuda.stream(stream),
        torch.no_grad(),
        exact(torch, tf32=tf32),
    ):
        copies = [call.prepare(*(tensor(array).to(gpu.text) for array in inputs)) for _ in range(sets.count)]
        for _ in range(3):  # the first call tries the algorithms, which a capture does not allow
            output = call.compute(*copies[0])
        result = call.finish(output).float().cpu().numpy()
        del output

        def capture(launches: int) -> Replay:
            graph = torch.cuda.CUDAGraph()
            # Hot: each output is freed at once and the next takes its place. Cold: each set has an output.
            outputs: list[Any] = [None] * sets.count
            with torch.cuda.graph(graph, stream=stream):
                for i in range(launches):
                    outputs[i % sets.count] = None
                    outputs[i % sets.count] = call.compute(*copies[i % sets.count])
            return graph.replay

        timing = time_sets(capture, stream.cuda_stream, sets, seconds)
    settings = ("best algorithm", "TF32" if tf32 else "no TF32")
    return Baseline(timing, result, ", ".join([*_versions(torch), *settings, *call.notes]))


def torch_with_cudnn() -> Any:
    """PyTorch; raises `DeviceError` where it is missing, or has no cuDNN."""
    try:
        import torch
    except ImportError as error:
        raise DeviceError(f"the cuDNN baseline needs PyTorch: {how_to_install('torch')}") from error
    if not torch.cuda.is_available() or not torch.backends.cudnn.is_available():
        raise DeviceError(
            f"PyTorch {torch.__version__} has no CUDA device with cuDNN: install a build for CUDA from pytorch.org"
        )
    return torch


@contextmanager
def exact(torch: Any, *, tf32: bool) -> Iterator[None]:
    """Let cuDNN try every algorithm, and nobody round to TF32 unless that is what is asked for."""
    wanted = (
        (torch.backends.cudnn, "benchmark", True),
        (torch.backends.cudnn, "benchmark_limit", 0),  # 0: all of them
        (torch.backends.cudnn, "allow_tf32", tf32),
        (torch.backends.cuda.matmul, "allow_tf32", tf32),
    )
    before = [getattr(place, name) for place, name, _ in wanted]
    for place, name, value in wanted:
        setattr(place, name, value)
    try:
        yield
    finally:
        for (place, name, _), value in zip(wanted, before, strict=True):
            setattr(place, name, value)


def _versions(torch: Any) -> tuple[str, str]:
    version = torch.backends.cudnn.version()  # 91900 is 9.19.0, and before cuDNN 9 8907 was 8.9.7
    major, rest = divmod(version, 10_000 if version >= 90_000 else 1000)
    return f"cuDNN {major}.{rest // 100}", f"PyTorch {torch.__version__}"
