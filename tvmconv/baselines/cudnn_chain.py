"""cuDNN, through PyTorch, for all convolutions of a network: each alone, and one after another in one CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.baselines.base import Baseline, border_of, check_gpu
from tvmconv.baselines.cudnn import exact, time_pick, torch_with_cudnn
from tvmconv.baselines.torch_calls import Call, calls_in, tensor
from tvmconv.compiler.program import ArrayType
from tvmconv.devices.cuda.chain import chain_timing, links
from tvmconv.devices.cuda.graphs import time_replay
from tvmconv.errors import DeviceError
from tvmconv.workloads import dtypes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.devices.base import Device, Timing
    from tvmconv.devices.cuda.device import CudaDevice
    from tvmconv.workloads.conv import Conv

PICKS = 3  # threads in which cuDNN picks for the whole chain

Inputs = Mapping["Conv", Sequence["NDArray[Any]"]]


@dataclass(frozen=True)
class CudnnChain:
    """cuDNN's times for a network's convolutions.

    Attributes:
        timing: of all, in one CUDA graph.
        singles: each distinct convolution alone.
    """

    timing: Timing
    singles: Mapping[Conv, Baseline]


def time_cudnn_chain(
    workloads: Sequence[Conv],
    inputs: Inputs,
    *,
    device: Device,
    picks: int = PICKS,
    seconds: float = 0.5,
    single_seconds: float = 0.05,
) -> CudnnChain:
    """Time PyTorch's convolutions with cuDNN's fastest algorithms, in the workloads' layout.

    Each has tensors of its own, and reads what the one before it wrote where that fits, as `Chain` has it. Of an
    epilogue that cuDNN can fuse, the faster way is taken. As cuDNN picks anew in each thread, not always the fastest
    algorithm, it is asked in several: the fastest graph counts, and the fastest time of each convolution alone.

    Args:
        workloads: in the network's order, equal ones as well.
        inputs: of each distinct one, all arguments but Y.
        device: an NVIDIA GPU.
        picks: in how many threads to ask.
        seconds: device time to spend on the graph in each, about.
        single_seconds: as much for each way of each distinct convolution.

    Raises:
        WrongDeviceError: `device` is no NVIDIA GPU.
        DeviceError: PyTorch with cuDNN is missing, or it fails.
    """
    gpu = check_gpu(device, "cuDNN")
    torch = torch_with_cudnn()  # missing, it is missed before threads are started
    found = []
    try:
        for _ in range(picks):
            with ThreadPoolExecutor(max_workers=1) as thread:
                found.append(thread.submit(_pick, workloads, inputs, gpu, seconds, single_seconds).result())
    finally:
        torch.cuda.empty_cache()  # as in `time_cudnn`
    fastest = min((timing for timing, _ in found), key=lambda timing: timing.median)
    singles = {w: min((each[w] for _, each in found), key=lambda one: one.timing.median) for w in inputs}
    return CudnnChain(fastest, singles)


def _pick(
    workloads: Sequence[Conv], inputs: Inputs, gpu: CudaDevice, seconds: float, single_seconds: float
) -> tuple[Timing, dict[Conv, Baseline]]:
    """Let cuDNN pick, in this thread."""
    torch = torch_with_cudnn()
    chosen = {w: _faster(w, inputs[w], gpu, single_seconds) for w in inputs}
    tf32 = all(w.dtype == dtypes.TF32.name for w in workloads)
    stream = torch.cuda.Stream(gpu.index)
    with (
        border_of("cuDNN through PyTorch", gpu, RuntimeError),
        torch.cuda.device(gpu.index),
        torch.cuda.stream(stream),
        torch.no_grad(),
        exact(torch, tf32=tf32),
    ):
        calls = [chosen[w][0] for w in workloads]
        given = [
            call.prepare(*(tensor(array).to(gpu.text) for array in inputs[w]))
            for w, call in zip(workloads, calls, strict=True)
        ]
        linked = linked_workloads(workloads)

        def compute() -> list[Any]:
            outputs: list[Any] = []  # all of which are kept: each has memory of its own
            for call, (first, *others), follows in zip(calls, given, linked, strict=True):
                outputs.append(call.compute(outputs[-1] if follows else first, *others))
            return outputs

        for _ in range(3):  # as in `time_pick`
            compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = compute()
        samples = time_replay(graph.replay, stream.cuda_stream, seconds)
        del outputs
    return chain_timing(samples, len(calls)), {w: single for w, (_, single) in chosen.items()}


def linked_workloads(workloads: Sequence[Conv]) -> list[bool]:
    """Whether each convolution can read what the one before it writes; see `links`."""
    shapes = [w.argument_shapes for w in workloads]
    kinds = [w.argument_dtypes for w in workloads]
    return links(*([ArrayType(s[i], k[i]) for s, k in zip(shapes, kinds, strict=True)] for i in (0, -1)))


def _faster(w: Conv, inputs: Sequence[NDArray[Any]], gpu: CudaDevice, seconds: float) -> tuple[Call, Baseline]:
    """The faster one of the ways that cuDNN can go in the workload's layout."""
    found, errors = [], []
    for call in calls_in(w, w.layout):
        try:
            found.append((call, time_pick(w, call, inputs, gpu, cold=False, seconds=seconds)))
        except DeviceError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return min(found, key=lambda one: one[1].timing.median)
