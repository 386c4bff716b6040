"""A network's convolutions one after another: each kernel verified and timed alone, then all of them in one graph."""

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

KERNEL_SECONDS = 0.05  # of timing each kernel alone
GRAPH, OVERLAPPING, CUDNN_GRAPH = "graph", "overlapping", "cudnn graph"  # what is timed of all layers together


@dataclass(frozen=True)
class ChainLayer:
    """One layer of the chain.

    Attributes:
        layer: its name.
        workload: its text.
        schedule: of its kernel.
        origin: where the config is from.
        linked: whether it reads what the layer before it wrote.
        overlaps: whether it may begin before the layer before it has ended.
        seconds: of its kernel alone.
        cudnn: seconds of cuDNN alone; None where that was not asked.
        how: what cuDNN ran.
    """

    layer: str
    workload: str
    schedule: str
    origin: str
    linked: bool
    overlaps: bool
    seconds: float
    cudnn: float | None = None
    how: str = ""


@dataclass(frozen=True)
class ChainKernel:
    """A kernel for a convolution.

    Attributes:
        schedule: its name.
        config_source: where the config is from.
        program: the code.
        versions: of what made it elsewhere; None for here.
    """

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
    """Verify each kernel and time it alone, then all in one graph, and then cuDNN.

    Args:
        layers: names and what they compute, in the network's order, equal ones as well.
        kernels: a kernel for each distinct convolution.
        device: where.
        on_progress: is told what goes on.
        picks: how often cuDNN may pick its algorithms; 0 to leave it out.

    Returns:
        The layers, and the times of all of them together: `GRAPH`, and `OVERLAPPING` and `CUDNN_GRAPH` where there are.

    Raises:
        Error: a kernel computes something else, alone or in the chain.
        DeviceError: a kernel fails, or PyTorch with cuDNN is missing.
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
    """Compare a kernel with float64 where its output lies; raises `Error` for a wrong one."""
    benchmark = kernel.device.create_benchmark(problem.inputs, problem.expected_output)
    try:
        comparison = benchmark.compare(kernel)
    finally:
        benchmark.close()
    tolerance = problem.workload.tolerance
    if not comparison.is_within_tolerance(tolerance):
        raise Error(f"{schedule} computes {problem.workload} wrong: {comparison.describe_mismatch(tolerance)}")


def scale_weights(workload: Conv, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Inputs whose weights are so small that outputs are about as large as inputs, however many layers there are.

    Source: He et al., "Delving Deep into Rectifiers", 2015, section 2.2.
    """
    input_array, weight, *channel_arguments = inputs
    gain = 2 if "relu" in workload.epilogue else 1
    scale = math.sqrt(gain / math.prod(workload.weight_shape[1:]))
    return [input_array, (weight.astype(np.float32) * np.float32(scale)).astype(weight.dtype), *channel_arguments]


def _time_chain(chain: KernelChain, names: Sequence[str]) -> dict[str, Timing]:
    """Times of all kernels in one graph; raises `Error` where they leave something else if they overlap.

    To the last bit: sums are added in the same order, and what is read too early is NaN.
    """
    expected = chain.run()
    for name, output in zip(names, expected, strict=True):
        if not np.isfinite(output.astype(np.float32)).all():
            raise Error(f"the chain leaves infinities or NaN in {name}")
    times = {GRAPH: chain.time()}
    if any(chain.overlaps_previous):
        for name, sequential_output, overlapping_output in zip(names, expected, chain.run(use_pdl=True), strict=True):
            if sequential_output.tobytes() != overlapping_output.tobytes():
                raise Error(f"{name} leaves something else where kernels overlap")
        times[OVERLAPPING] = chain.time(use_pdl=True)
    return times


def split_common_settings(chain_layers: Sequence[ChainLayer]) -> tuple[list[str], list[ChainLayer]]:
    """What cuDNN said of itself of every layer, its version, say; and the layers with what else it said of each."""
    settings = [chain_layer.how.split(", ") for chain_layer in chain_layers]
    common_settings = [setting for setting in settings[0] if setting and all(setting in parts for parts in settings)]
    other_settings = [", ".join(setting for setting in parts if setting not in common_settings) for parts in settings]
    return common_settings, [
        replace(chain_layer, how=own_settings)
        for chain_layer, own_settings in zip(chain_layers, other_settings, strict=True)
    ]
