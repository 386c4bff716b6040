"""cuDNN through PyTorch for all convolutions of a network, both alone and in one CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from tvmconv.baselines.base import Baseline, require_gpu
from tvmconv.baselines.cudnn import CudnnPick, compute_on_stream, torch_with_cudnn
from tvmconv.baselines.torch_calls import TorchConvCall, list_calls, list_calls_in_layout, to_tensor
from tvmconv.compiler.executable import ArrayType
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.devices.cuda.graphs import time_replay
from tvmconv.devices.cuda.kernel_chain import find_linked_inputs, make_chain_timing
from tvmconv.devices.device import Device, Timing
from tvmconv.errors import DeviceError
from tvmconv.workloads import dtypes
from tvmconv.workloads.conv import Conv
from tvmconv.workloads.layout import MIXED_LAYOUTS

NUM_PICKS = 3  # threads that each let cuDNN pick for the whole chain

WorkloadInputs = Mapping[Conv, Sequence[NDArray[Any]]]


@dataclass(frozen=True)
class CudnnChain:
    """Times of cuDNN for the convolutions of a network."""

    timing: Timing  # of all convolutions in one CUDA graph
    singles: Mapping[Conv, Baseline]  # of each distinct convolution alone


def time_cudnn_chain(
    workloads: Sequence[Conv],
    inputs: WorkloadInputs,
    *,
    device: Device,
    num_picks: int = NUM_PICKS,
    seconds: float = 0.5,
    single_seconds: float = 0.05,
) -> CudnnChain:
    """Time PyTorch's convolutions with cuDNN's fastest algorithms, in the layout of the workloads.

    Each convolution has its own tensors, and reads the output of its predecessor if it fits, as in `KernelChain`. If
    cuDNN can fuse an epilogue, the faster one of both variants is used. cuDNN does not always pick the fastest
    algorithm, and picks again in each thread. The results are the fastest graph and the fastest time of each
    convolution over `num_picks` threads. The device times are those in each thread.
    """
    gpu = require_gpu(device, "cuDNN")
    torch = torch_with_cudnn()  # raises before threads are started
    results = []
    try:
        for _ in range(num_picks):
            with ThreadPoolExecutor(max_workers=1) as thread:
                future = thread.submit(_time_chain_once, workloads, inputs, gpu, seconds, single_seconds)
                results.append(future.result())
    finally:
        torch.cuda.empty_cache()  # as in `time_cudnn`
    fastest = min((timing for timing, _ in results), key=lambda timing: timing.median)
    singles = {w: min((times[w] for _, times in results), key=lambda single: single.timing.median) for w in inputs}
    return CudnnChain(fastest, singles)


def _time_chain_once(
    workloads: Sequence[Conv], inputs: WorkloadInputs, gpu: CudaDevice, seconds: float, single_seconds: float
) -> tuple[Timing, dict[Conv, Baseline]]:
    """Let cuDNN pick in this thread, and time the chain."""
    torch = torch_with_cudnn()
    call_by_workload = {w: _pick_faster_call(w, inputs[w], gpu, single_seconds) for w in inputs}
    tf32 = all(w.dtype == dtypes.TF32.name for w in workloads)
    stream = torch.cuda.Stream(gpu.index)
    with compute_on_stream(torch, gpu, stream, allow_tf32=tf32):
        calls = [call_by_workload[w][0] for w in workloads]
        prepared_inputs = [
            call.prepare(*(to_tensor(array).to(gpu.text) for array in inputs[w]))
            for w, call in zip(workloads, calls, strict=True)
        ]
        linked = find_linked_workloads(workloads)

        def compute() -> list[Any]:
            outputs: list[Any] = []  # kept, so that each output has its own memory
            for call, (first, *others), reads_previous in zip(calls, prepared_inputs, linked, strict=True):
                outputs.append(call.compute(outputs[-1] if reads_previous else first, *others))
            return outputs

        for _ in range(3):  # the first call tries the algorithms
            compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = compute()
        samples = time_replay(graph.replay, stream.cuda_stream, seconds)
        del outputs
    return make_chain_timing(samples, len(calls)), {w: single for w, (_, single) in call_by_workload.items()}


def find_linked_workloads(workloads: Sequence[Conv]) -> list[bool]:
    """Return for each convolution whether it can read the output of its predecessor; see `find_linked_inputs`."""
    shapes = [w.argument_shapes for w in workloads]
    kinds = [w.argument_dtypes for w in workloads]
    return find_linked_inputs(*([ArrayType(s[i], k[i]) for s, k in zip(shapes, kinds, strict=True)] for i in (0, -1)))


def _pick_faster_call(
    w: Conv, inputs: Sequence[NDArray[Any]], gpu: CudaDevice, seconds: float
) -> tuple[TorchConvCall, Baseline]:
    """Return the fastest call of cuDNN in the layout of the workload, in either for a mixed one, with its result."""
    timed_calls, errors = [], []
    for call in list_calls(w) if w.layout in MIXED_LAYOUTS else list_calls_in_layout(w, w.layout):
        try:
            pick = CudnnPick(w, call, inputs, gpu, cold=False)
            timed_calls.append((call, Baseline(pick.time(seconds), pick.compute_output(), pick.description)))
        except DeviceError as error:
            errors.append(error)
    if not timed_calls:
        raise errors[0]
    return min(timed_calls, key=lambda timed_call: timed_call[1].timing.median)
