"""A network's convolutions one after another: each kernel verified and timed alone, then all of them in one graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tvmconv.baselines.cudnn_chain import time_cudnn_chain
from tvmconv.compiler.program import Program
from tvmconv.devices import Timing
from tvmconv.devices.base import Loaded
from tvmconv.devices.cuda.chain import Chain
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.errors import Error
from tvmconv.experiments.run import Progress
from tvmconv.verify import Problem
from tvmconv.workloads import Conv

SINGLE_SECONDS = 0.05  # of timing each kernel alone
GRAPH, OVERLAPPING, CUDNN_GRAPH = "graph", "overlapping", "cudnn graph"  # what is timed of all layers together


@dataclass(frozen=True)
class Link:
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
class Built:
    """A kernel for a convolution.

    Attributes:
        schedule: its name.
        origin: where the config is from.
        program: the code.
        versions: of what made it elsewhere; None for here.
    """

    schedule: str
    origin: str
    program: Program
    versions: Mapping[str, str] | None = None


def measure_chain(
    layers: Sequence[tuple[str, Conv]],
    built: Mapping[Conv, Built],
    device: CudaDevice,
    tell: Progress,
    *,
    picks: int,
) -> tuple[list[Link], dict[str, Timing]]:
    """Verify each kernel and time it alone, then all in one graph, and then cuDNN.

    Args:
        layers: names and what they compute, in the network's order, equal ones as well.
        built: a kernel for each distinct convolution.
        device: where.
        tell: is told what goes on.
        picks: how often cuDNN may pick its algorithms; 0 to leave it out.

    Returns:
        The layers, and the times of all of them together: `GRAPH`, and `OVERLAPPING` and `CUDNN_GRAPH` where there are.

    Raises:
        Error: a kernel computes something else, alone or in the chain.
        DeviceError: a kernel fails, or PyTorch with cuDNN is missing.
    """
    convolutions = [w for _, w in layers]
    alone: dict[Conv, Timing] = {}
    inputs: dict[Conv, list[np.ndarray]] = {}
    for number, (w, kernel) in enumerate(built.items(), 1):
        tell(f"alone: {number} of {len(built)}, {w}")
        loaded, problem = device.load(kernel.program), Problem(w)
        _check(loaded, problem, kernel.schedule)
        inputs[w] = steady(w, problem.inputs)
        alone[w] = loaded.time(inputs[w], seconds=SINGLE_SECONDS)
    tell("in one graph")
    with Chain(device, [built[w].program for w in convolutions], [inputs[w] for w in convolutions]) as chain:
        times = _together(chain, [name for name, _ in layers])
    links = [
        Link(name, w.text, built[w].schedule, built[w].origin, reads, early, alone[w].median)
        for (name, w), reads, early in zip(layers, chain.linked, chain.overlapping, strict=True)
    ]
    if picks:
        tell("cuDNN")
        cudnn = time_cudnn_chain(convolutions, inputs, device=device, picks=picks, single_seconds=SINGLE_SECONDS)
        times[CUDNN_GRAPH] = cudnn.timing
        singles = [cudnn.singles[w] for w in convolutions]
        links = [
            replace(link, cudnn=single.timing.median, how=single.text)
            for link, single in zip(links, singles, strict=True)
        ]
    return links, times


def _check(kernel: Loaded, problem: Problem, schedule: str) -> None:
    """Compare a kernel with float64 where its output lies; raises `Error` for a wrong one."""
    bench = kernel.device.bench(problem.inputs, problem.expected)
    try:
        found = bench.compare(kernel)
    finally:
        bench.close()
    tolerance = problem.workload.tolerance
    if not found.is_right(tolerance):
        raise Error(f"{schedule} computes {problem.workload} wrong: {found.fault(tolerance)}")


def steady(w: Conv, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Inputs whose weights are so small that outputs are about as large as inputs, however many layers there are.

    Source: He et al., "Delving Deep into Rectifiers", 2015, section 2.2.
    """
    x, k, *others = inputs
    gain = 2 if "relu" in w.epilogue else 1
    scale = math.sqrt(gain / math.prod(w.weight_shape[1:]))
    return [x, (k.astype(np.float32) * np.float32(scale)).astype(k.dtype), *others]


def _together(chain: Chain, names: Sequence[str]) -> dict[str, Timing]:
    """Times of all kernels in one graph; raises `Error` where they leave something else if they overlap.

    To the last bit: sums are added in the same order, and what is read too early is NaN.
    """
    expected = chain.run()
    for name, output in zip(names, expected, strict=True):
        if not np.isfinite(output.astype(np.float32)).all():
            raise Error(f"the chain leaves infinities or NaN in {name}")
    times = {GRAPH: chain.time()}
    if any(chain.overlapping):
        for name, before, after in zip(names, expected, chain.run(overlap=True), strict=True):
            if before.tobytes() != after.tobytes():
                raise Error(f"{name} leaves something else where kernels overlap")
        times[OVERLAPPING] = chain.time(overlap=True)
    return times


def without_common(links: Sequence[Link]) -> tuple[list[str], list[Link]]:
    """What cuDNN said of itself of every layer, its version, say; and the layers with what else it said of each."""
    told = [link.how.split(", ") for link in links]
    common = [part for part in told[0] if part and all(part in parts for parts in told)]
    rest = [", ".join(part for part in parts if part not in common) for parts in told]
    return common, [replace(link, how=how) for link, how in zip(links, rest, strict=True)]
