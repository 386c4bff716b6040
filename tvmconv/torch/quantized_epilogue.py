"""The epilogue of an 8-bit convolution: the operations of the layer, between those that scale and quantize.

A residual has the type of the output. If both have 8 bits, the kernel adds the residual's integers or 8-bit floats, so
the sum is in units of the residual's scale. An activation that maps c · y to c · its value for all c > 0, such as relu,
is the same in these units. Before another activation, `tensor_scale` returns to the layer's own units.

If the smallest integer stands for zero in an output that a ReLU precedes, the bias has the zero point, and saturation
is the ReLU: the epilogue then has neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvmconv.workloads.epilogues.operations import SLOPES

ADD = "add"
SCALE, TENSOR_SCALE, QUANTIZE, ZERO_POINT = "scale", "tensor_scale", "quantize", "zero_point"
SMALLEST_INTEGER = -128  # of int8
# Activations that a positive factor on their argument multiplies.
HOMOGENEOUS_OPS = frozenset({"relu", "prelu", *SLOPES})


def can_fold_zero_point(names: Sequence[str]) -> bool:
    """Return whether a layer's output may have the smallest integer as its zero point at no cost.

    Args:
        names: Operations of the layer after the bias, with `add` for a residual.
    """
    return tuple(names) in (("relu",), (ADD, "relu"))


@dataclass(frozen=True)
class QuantizedEpilogue:
    """The operations of a kernel's epilogue, and the numbers that they read."""

    ops: tuple[str, ...]
    unit: float = 1.0  # scale and bias are divided by it
    tensor_scale: float | None = None  # argument of the operation; None without it
    quantize: float | None = None  # likewise
    bias_offset: float = 0.0  # what is added to the bias, in units of it, for the zero point of the output


def plan_epilogue(
    names: Sequence[str],
    *,
    has_bias: bool,
    output_scale: float | None = None,
    residual_scale: float | None = None,
    has_zero_point: bool = False,
    folds_zero_point: bool = False,
) -> QuantizedEpilogue | None:
    """Return the epilogue of a layer; None if no list of operations, each used at most once, computes it.

    Args:
        names: Operations of the layer after the bias, with `add` for a residual.
        has_bias: Whether the layer has a bias.
        output_scale: Scale of the output; None for an output in 16 or 32 bits.
        residual_scale: Scale of a residual of 8 bits, which has an output of 8 bits.
        has_zero_point: Whether an output of 8 bits has a zero point other than 0.
        folds_zero_point: Whether this is the smallest integer, and the layer ends as `can_fold_zero_point` asks for.
    """
    if folds_zero_point:
        assert can_fold_zero_point(names)
        assert has_bias
        plan = plan_epilogue(names[:-1], has_bias=True, output_scale=output_scale, residual_scale=residual_scale)
        assert plan is not None
        assert plan.quantize is not None
        return replace(plan, bias_offset=SMALLEST_INTEGER / plan.quantize)
    start = (SCALE, "bias") if has_bias else (SCALE,)
    quantizing = () if output_scale is None else (QUANTIZE, *[ZERO_POINT] * has_zero_point)
    factor = None if output_scale is None else 1 / output_scale
    if ADD not in names or residual_scale is None:
        return QuantizedEpilogue((*start, *names, *quantizing), quantize=factor)
    assert factor is not None
    index = names.index(ADD)
    before, after = tuple(names[:index]), tuple(names[index + 1 :])
    factor_after = residual_scale * factor
    if HOMOGENEOUS_OPS.issuperset(before):
        if HOMOGENEOUS_OPS.issuperset(after):
            return QuantizedEpilogue((*start, *names, *quantizing), residual_scale, None, factor_after)
        ops = (*start, *before, ADD, TENSOR_SCALE, *after, *quantizing)
        return QuantizedEpilogue(ops, residual_scale, residual_scale, factor)
    if HOMOGENEOUS_OPS.issuperset(after):
        ops = (*start, *before, TENSOR_SCALE, ADD, *after, *quantizing)
        return QuantizedEpilogue(ops, 1.0, 1 / residual_scale, factor_after)
    return None
