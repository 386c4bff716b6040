"""The convolutions of a Relax function with their epilogues; linear operations are folded into weight and bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import relax

from tvmconv.models.epilogue_fusion import FusedConvolution, fuse_convolutions
from tvmconv.models.model_graph import ModelOp
from tvmconv.relax.graph import RelaxGraph, read_function
from tvmconv.workloads.conv_operator import ConvOperator


@dataclass(frozen=True)
class RelaxConvolution:
    """A convolution of a Relax function with its epilogue.

    The convolution's outputs are multiplied by `scale` and `bias` is added, before or between the activations as the
    epilogue says. Both have one number per output channel.
    """

    name: str  # Relax's name of the convolution's result
    workload: ConvOperator  # with its epilogue, channels first
    x: relax.Expr
    weight: relax.Expr
    scale: NDArray[np.float64]
    bias: NDArray[np.float64]
    residual: relax.Expr | None
    result: relax.Var  # variable that the last operation of the epilogue binds

    @property
    def is_scaled(self) -> bool:
        """Whether the scale changes the weight."""
        return not np.all(self.scale == 1)


def find_sites(function: relax.Function) -> tuple[list[RelaxConvolution], dict[str, str]]:
    """Return the convolutions of a function that are workloads, and the reason by name for each other one."""
    relax_graph = read_function(function)
    sites = [_make_site(relax_graph, convolution) for convolution in fuse_convolutions(relax_graph.graph)]
    reasons = dict(text.split(": ", 1) for text in relax_graph.graph.skipped_layers)
    return sites, reasons


def _make_site(relax_graph: RelaxGraph, convolution: FusedConvolution) -> RelaxConvolution:
    graph, workload = relax_graph.graph, convolution.layer.workload
    assert isinstance(workload, ConvOperator)
    conv = graph.ops[convolution.conv_index]
    scale, bias, residual = np.ones(workload.O), np.zeros(workload.O), None
    value = conv.writes[0]
    for step in convolution.fused_ops:
        last = graph.ops[step.op_indices[-1]]
        if step.name == "add":
            residual = relax_graph.exprs[next(read for read in last.reads if read != value)]
        elif step.name in ("", "bias") and len(step.op_indices) == 1:
            factor, summand = _compute_linear_op(relax_graph, last, relax_graph.bindings[step.op_indices[0]], value)
            scale, bias = scale * factor, bias * factor + summand
        value = last.writes[0]
    x, weight = (relax_graph.exprs[name] for name in conv.reads)
    result = relax_graph.results[value]
    return RelaxConvolution(conv.name, workload, x, weight, scale, bias, residual, result)


def _compute_linear_op(
    relax_graph: RelaxGraph, op: ModelOp, binding: relax.Binding, value: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the factor and the summand per channel of an operation that is linear in a value."""
    constants = [_list_channels(relax_graph.find_constant(read)) for read in op.reads if read != value]
    if op.kind == "norm":
        gamma, beta, mean, variance = constants
        attrs = binding.value.attrs
        factor = (gamma if attrs.scale else 1.0) / np.sqrt(variance + float(attrs.epsilon))
        return factor, (beta if attrs.center else 0.0) - mean * factor
    compute = op.compute
    assert compute is not None

    def evaluate(x: float) -> NDArray[np.float64]:
        remaining = iter(constants)
        return np.asarray(compute(*(x if read == value else next(remaining) for read in op.reads)), np.float64)

    summand = evaluate(0.0)
    return evaluate(1.0) - summand, summand


def _list_channels(array: NDArray[Any] | None) -> NDArray[np.float64]:
    """Return a constant with at most one number per channel as a vector."""
    assert array is not None
    return array.astype(np.float64).reshape(-1)


def make_weight(site: RelaxConvolution, elements: NDArray[Any], *, channels_last: bool) -> NDArray[Any]:
    """Return the weight of a site with the scale folded in, in the memory order of the layout and its own dtype."""
    weight = elements
    if site.is_scaled:
        weight = (elements.astype(np.float64) * reshape_scale(site)).astype(elements.dtype)
    return np.ascontiguousarray(np.moveaxis(weight, 1, -1)) if channels_last else weight


def reshape_scale(site: RelaxConvolution) -> NDArray[np.float64]:
    """Return the scale of a site as an array that is multiplied with its weight, channels first."""
    workload = site.workload
    ones = (1,) * workload.spatial_ndim
    if workload.kind != "transpose":
        return site.scale.reshape(-1, 1, *ones)
    filters = workload.O // workload.groups  # the weight is (C, O / groups, kernel), and C is divided by groups
    grouped = site.scale.reshape(workload.groups, 1, filters)
    channels = workload.C // workload.groups
    return np.broadcast_to(grouped, (workload.groups, channels, filters)).reshape(workload.C, filters, *ones)
