"""cuDNN, through PyTorch, for all convolutions of a network: each alone, and one after another in one CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.baselines.base import Baseline, require_gpu, translate_library_errors
from tvmconv.baselines.cudnn import configure_cudnn, time_pick, torch_with_cudnn
from tvmconv.baselines.torch_calls import TorchConvCall, list_calls_in_layout, to_tensor
from tvmconv.compiler.executable import ArrayType
from tvmconv.devices.cuda.graphs import time_replay
from tvmconv.devices.cuda.kernel_chain import find_linked_inputs, make_chain_timing
from tvmconv.errors import DeviceError
from tvmconv.workloads import dtypes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.devices.cuda.device import CudaDevice
    from tvmconv.devices.device import Device, Timing
    from tvmconv.workloads.conv import Conv

NUM_PICKS = 3  # threads in which cuDNN picks for the whole chain

WorkloadInputs = Mapping["Conv", Sequence["NDArray[Any]"]]


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
    inputs: WorkloadInputs,
    *,
    device: Device,
    num_picks: int = NUM_PICKS,
    seconds: float = 0.5,
    single_seconds: float = 0.05,
) -> CudnnChain:
    """Time PyTorch's convolutions with cuDNN's fastest algorithms, in the workloads' layout.

    Each has tensors of its own, and reads what the one before it wrote where that fits, as `KernelChain` has it. Of an
    epilogue that cuDNN can fuse, the faster way is taken. As cuDNN picks anew in each thread, not always the fastest
    algorithm, it is asked in several: the fastest graph counts, and the fastest time of each convolution alone.

    Args:
        workloads: in the network's order, equal ones as well.
        inputs: of each distinct one, all arguments but Y.
        device: an NVIDIA GPU.
        num_picks: in how many threads to ask.
        seconds: device time to spend on the graph in each, about.
        single_seconds: as much for each way of each distinct convolution.

    Raises:
        UnsupportedDeviceError: `device` is no NVIDIA GPU.
        DeviceError: PyTorch with cuDNN is missing, or it fails.
    """
    gpu = require_gpu(device, "cuDNN")
    torch = torch_with_cudnn()  # missing, it is missed before threads are started
    results = []
    try:
        for _ in range(num_picks):
            with ThreadPoolExecutor(max_workers=1) as thread:
                results.append(
                    thread.submit(_time_chain_once, workloads, inputs, gpu, seconds, single_seconds).result()
                )
    finally:
        torch.cuda.empty_cache()  # as in `time_cudnn`
    fastest = min((timing for timing, _ in results), key=lambda timing: timing.median)
    singles = {
        w: min((thread_singles[w] for _, thread_singles in results), key=lambda single: single.timing.median)
        for w in inputs
    }
    return CudnnChain(fastest, singles)


def _time_chain_once(
    workloads: Sequence[Conv], inputs: WorkloadInputs, gpu: CudaDevice, seconds: float, single_seconds: float
) -> tuple[Timing, dict[Conv, Baseline]]:
    """Let cuDNN pick, in this thread."""
    torch = torch_with_cudnn()
    call_by_workload = {w: _pick_faster_call(w, inputs[w], gpu, single_seconds) for w in inputs}
    tf32 = all(w.dtype == dtypes.TF32.name for w in workloads)
    stream = torch.cuda.Stream(gpu.index)
    with (
        translate_library_errors("cuDNN through PyTorch", gpu, RuntimeError),
        torch.cuda.device(gpu.index),
        torch.cuda.stream(stream),
        torch.no_grad(),
        configure_cudnn(torch, allow_tf32=tf32),
    ):
        calls = [call_by_workload[w][0] for w in workloads]
        prepared_inputs = [
            call.prepare(*(to_tensor(array).to(gpu.text) for array in inputs[w]))
            for w, call in zip(workloads, calls, strict=True)
        ]
        linked = find_linked_workloads(workloads)

        def compute() -> list[Any]:
            outputs: list[Any] = []  # all of which are kept: each has memory of its own
            for call, (first, *others), reads_previous in zip(calls, prepared_inputs, linked, strict=True):
                outputs.append(call.compute(outputs[-1] if reads_previous else first, *others))
            return outputs

        for _ in range(3):  # as in `time_pick`
            compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = compute()
        samples = time_replay(graph.replay, stream.cuda_stream, seconds)
        del outputs
    return make_chain_timing(samples, len(calls)), {w: single for w, (_, single) in call_by_workload.items()}


def find_linked_workloads(workloads: Sequence[Conv]) -> list[bool]:
    """Whether each convolution can read what the one before it writes; see `find_linked_inputs`."""
    shapes = [w.argument_shapes for w in workloads]
    kinds = [w.argument_dtypes for w in workloads]
    return find_linked_inputs(*([ArrayType(s[i], k[i]) for s, k in zip(shapes, kinds, strict=True)] for i in (0, -1)))


def _pick_faster_call(
    w: Conv, inputs: Sequence[NDArray[Any]], gpu: CudaDevice, seconds: float
) -> tuple[TorchConvCall, Baseline]:
    """The faster one of the ways that cuDNN can go in the workload's layout."""
    timed_calls, errors = [], []
    for call in list_calls_in_layout(w, w.layout):
        try:
            timed_calls.append((call, time_pick(w, call, inputs, gpu, cold=False, seconds=seconds)))
        except DeviceError as error:
            errors.append(error)
    if not timed_calls:
        raise errors[0]
    return min(timed_calls, key=lambda timed_call: timed_call[1].timing.median)
