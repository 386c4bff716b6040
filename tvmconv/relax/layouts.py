"""The choice of layouts: which chains of convolutions run channels last inside a model that is channels first.

A chain is a set of convolutions that read each other's results. It runs channels last if the estimated time of its
kernels and of the transpositions at its borders is shorter than that of its channels-first kernels. Without an estimate
for each kernel, chains of 16-bit convolutions on tensor cores run channels last, because those kernels then read and
write their tensors without a conversion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from tvmconv.cost_model.model import cost_model_for
from tvmconv.devices import Device
from tvmconv.errors import Error, TuningError
from tvmconv.relax.sites import RelaxConvolution
from tvmconv.workloads.conv_operator import ConvOperator

if TYPE_CHECKING:
    from tvm import relax

    from tvmconv.target import Target as DeviceSpec

Layout = Literal["auto", "nchw", "nhwc"]
EstimateSeconds = Callable[[ConvOperator], "float | None"]
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
TENSOR_CORE_DTYPES = ("float16", "bfloat16")


def validate_layout(layout: str) -> Layout:
    """Return `layout` if it is valid; raise TuningError otherwise."""
    if layout not in get_args(Layout):
        raise TuningError(f"layout={layout!r}: expected one of {', '.join(get_args(Layout))}")
    return layout  # type: ignore[return-value]


def plan_layouts(
    sites: Sequence[RelaxConvolution], device: Device | None, layout: Layout, estimate: EstimateSeconds
) -> list[ConvOperator]:
    """Return the workload of each site with its layout.

    Args:
        sites: Convolutions of a function, channels first.
        device: Device that they run on; None for a CPU.
        layout: "nchw" and "nhwc" for one layout everywhere, "auto" for the faster one of each chain.
        estimate: Function that returns the estimated seconds of a workload's kernel, or None; it may raise Error.
    """
    if layout == "nhwc":
        return [site.workload.to_channels_last() for site in sites]
    if layout == "nchw" or device is None or device.kind != "cuda":
        return [site.workload for site in sites]
    cost_model = cost_model_for(device.arch)
    workloads = [site.workload for site in sites]
    for chain in group_chains(sites):
        members = [sites[index] for index in chain]
        if _prefers_channels_last(members, estimate, cost_model.device_spec if cost_model else None):
            for index in chain:
                workloads[index] = sites[index].workload.to_channels_last()
    return workloads


def group_chains(sites: Sequence[RelaxConvolution]) -> list[list[int]]:
    """Return the indices of the sites of each chain, in the order of the sites."""
    number_by_result: dict[relax.Expr, int] = {site.result: number for number, site in enumerate(sites)}
    chain_numbers = list(range(len(sites)))
    for number, site in enumerate(sites):
        for expr in (site.x, site.residual):
            if expr is not None and expr in number_by_result:
                old, new = chain_numbers[number], chain_numbers[number_by_result[expr]]
                chain_numbers = [new if each == old else each for each in chain_numbers]
    chains: dict[int, list[int]] = {}
    for number, chain_number in enumerate(chain_numbers):
        chains.setdefault(chain_number, []).append(number)
    return list(chains.values())


def _prefers_channels_last(
    sites: Sequence[RelaxConvolution], estimate: EstimateSeconds, device_spec: DeviceSpec | None
) -> bool:
    if sites[0].workload.storage not in TENSOR_CORE_DTYPES:
        return False  # transpositions cost time, and float32 kernels are as fast channels first
    if device_spec is None:
        return True
    try:
        first = [estimate(site.workload) for site in sites]
        last = [estimate(site.workload.to_channels_last()) for site in sites]
    except Error:  # one layout has no kernel; the report says so for the other one
        return True
    if None in first or None in last:
        return True
    borders = sum(_count_border_elements(sites)) * ELEMENT_BYTES[sites[0].workload.storage]
    border_seconds = 2 * borders / device_spec.bandwidth + device_spec.launch_seconds * len(
        _count_border_elements(sites)
    )
    return math.fsum(filter(None, last)) + border_seconds < math.fsum(filter(None, first))


def _count_border_elements(sites: Sequence[RelaxConvolution]) -> list[int]:
    """Return the sizes of the tensors that are transposed where a chain begins and ends."""
    results = {site.result for site in sites}
    inputs = {site.x: math.prod(site.workload.input_shape) for site in sites}
    inputs |= {site.residual: math.prod(site.workload.output_shape) for site in sites if site.residual is not None}
    ends = [math.prod(site.workload.output_shape) for site in sites if site.result not in inputs]
    return [*(size for expr, size in inputs.items() if expr not in results), *ends]
