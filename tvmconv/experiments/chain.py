"""The convolutions of a network in order: each kernel is verified and timed alone, then all run in one CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tvmconv.baselines.cudnn_chain import time_cudnn_chain
from tvmconv.compiler.executable import Executable
from tvmconv.devices import Timing
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.devices.cuda.kernel_chain import KernelChain
from tvmconv.devices.device import LoadedKernel
from tvmconv.errors import Error
from tvmconv.experiments.run import ProgressCallback
from tvmconv.verification import Problem
from tvmconv.workloads import Conv

KERNEL_SECONDS = 0.05  # time for timing each kernel alone
GRAPH, OVERLAPPING, CUDNN_GRAPH = "graph", "overlapping", "cudnn graph"  # names of the times of all layers together


@dataclass(frozen=True)
class ChainLayer:
    """One layer of the chain."""

    layer: str
    workload: str
    schedule: str
    origin: str  # source of the config
    linked: bool  # whether the layer reads the output of the previous layer
    overlaps: bool  # whether the kernel may start before the previous one ends
    seconds: float  # of the kernel alone
    cudnn: float | None = None  # seconds of cuDNN alone; None if it was not timed
    how: str = ""  # algorithm and settings of cuDNN


@dataclass(frozen=True)
class ChainKernel:
    """A compiled kernel for a convolution, and the software versions of the host that built it; None for this host."""

    schedule: str
    config_source: str
    program: Executable
    versions: Mapping[str, str] | None = None


def measure_chain(
    layers: Sequence[tuple[str, Conv]],
    kernels: Mapping[Conv, ChainKernel],
    device: CudaDevice,
    on_progress: ProgressCallback,
    *,
    picks: int,
) -> tuple[list[ChainLayer], dict[str, Timing]]:
    """Verify and time each kernel alone, then time all kernels in one graph, and then cuDNN.

    Args:
        layers: Names and workloads of the layers, in the order of the network, with repetitions.
        kernels: Kernel for each distinct convolution.
        device: CUDA device.
        on_progress: Function that is called with a text at each step.
        picks: Number of times that cuDNN selects its algorithms; 0 to leave cuDNN out.

    Returns:
        The layers, and the times of all layers together by name: `GRAPH`, and if available `OVERLAPPING` and
        `CUDNN_GRAPH`.

    Raises:
        Error: A kernel gives a wrong result, alone or in the chain.
        DeviceError: A kernel fails, or PyTorch with cuDNN is missing.
    """
    convolutions = [workload for _, workload in layers]
    kernel_timings: dict[Conv, Timing] = {}
    inputs: dict[Conv, list[np.ndarray]] = {}
    for number, (workload, kernel) in enumerate(kernels.items(), 1):
        on_progress(f"alone: {number} of {len(kernels)}, {workload}")
        loaded, problem = device.load(kernel.program), Problem(workload)
        _verify_kernel(loaded, problem, kernel.schedule)
        inputs[workload] = scale_weights(workload, problem.inputs)
        kernel_timings[workload] = loaded.time(inputs[workload], seconds=KERNEL_SECONDS)
    on_progress("in one graph")
    with KernelChain(
        device,
        [kernels[workload].program for workload in convolutions],
        [inputs[workload] for workload in convolutions],
    ) as chain:
        times = _time_chain(chain, [name for name, _ in layers])
    chain_layers = [
        ChainLayer(
            name,
            workload.text,
            kernels[workload].schedule,
            kernels[workload].config_source,
            reads_previous_output,
            overlaps,
            kernel_timings[workload].median,
        )
        for (name, workload), reads_previous_output, overlaps in zip(
            layers, chain.reads_previous_output, chain.overlaps_previous, strict=True
        )
    ]
    if picks:
        on_progress("cuDNN")
        cudnn = time_cudnn_chain(convolutions, inputs, device=device, num_picks=picks, single_seconds=KERNEL_SECONDS)
        times[CUDNN_GRAPH] = cudnn.timing
        singles = [cudnn.singles[workload] for workload in convolutions]
        chain_layers = [
            replace(chain_layer, cudnn=single_timing.timing.median, how=single_timing.description)
            for chain_layer, single_timing in zip(chain_layers, singles, strict=True)
        ]
    return chain_layers, times


def _verify_kernel(kernel: LoadedKernel, problem: Problem, schedule: str) -> None:
    """Compare the output of a kernel with float64 results on the device; raise Error if it is wrong."""
    benchmark = kernel.device.create_benchmark(problem.inputs, problem.expected_output)
    try:
        comparison = benchmark.compare(kernel)
    finally:
        benchmark.close()
    tolerance = problem.workload.tolerance
    if not comparison.is_within_tolerance(tolerance):
        raise Error(f"{schedule} computes {problem.workload} wrong: {comparison.describe_mismatch(tolerance)}")


def scale_weights(workload: Conv, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return inputs with scaled weights, so that activations keep their magnitude through any number of layers. Source:
    He et al., "Delving Deep into Rectifiers", 2015, section 2.2.
    """
    input_array, weight, *channel_arguments = inputs
    gain = 2 if "relu" in workload.epilogue else 1
    scale = math.sqrt(gain / math.prod(workload.weight_shape[1:]))
    return [input_array, (weight.astype(np.float32) * np.float32(scale)).astype(weight.dtype), *channel_arguments]


def _time_chain(chain: KernelChain, names: Sequence[str]) -> dict[str, Timing]:
    """Time all kernels in one graph; raise Error if overlapping kernels give other outputs. Outputs must agree bit by
    bit, because sums have the same order. Data that is read too early is NaN.
    """
    expected = chain.run()
    for name, output in zip(names, expected, strict=True):
        if not np.isfinite(output.astype(np.float32)).all():
            raise Error(f"the output of {name} in the chain has infinities or NaN")
    times = {GRAPH: chain.time()}
    if any(chain.overlaps_previous):
        for name, sequential_output, overlapping_output in zip(names, expected, chain.run(use_pdl=True), strict=True):
            if sequential_output.tobytes() != overlapping_output.tobytes():
                raise Error(f"the output of {name} differs when kernels overlap")
        times[OVERLAPPING] = chain.time(use_pdl=True)
    return times


def split_common_settings(chain_layers: Sequence[ChainLayer]) -> tuple[list[str], list[ChainLayer]]:
    """Split cuDNN's settings into those that all layers share, such as its version, and the layers with the rest."""
    settings = [chain_layer.how.split(", ") for chain_layer in chain_layers]
    common_settings = [setting for setting in settings[0] if setting and all(setting in parts for parts in settings)]
    other_settings = [", ".join(setting for setting in parts if setting not in common_settings) for parts in settings]
    return common_settings, [
        replace(chain_layer, how=own_settings)
        for chain_layer, own_settings in zip(chain_layers, other_settings, strict=True)
    ]
