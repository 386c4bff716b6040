"""The workload of a convolution of a model, or the reason why tvmconv's kernels cannot compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tvmconv.errors import ModelError
from tvmconv.models.model_graph import make_convolution
from tvmconv.torch.channel_affine import fold_affine
from tvmconv.torch.conv_site import ConvSite, Metadata, TensorMetadata
from tvmconv.torch.conv_source import COMPUTED_WEIGHT_REASON
from tvmconv.torch.torch_modules import has_hooks
from tvmconv.workloads.conv_operator import ConvOperator

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
TF32_DTYPE = "tf32"


def make_site_workload(site: ConvSite, metadata: Metadata, default_layout: str) -> ConvOperator:
    """Return the workload of a site; raise ModelError or WorkloadError with the reason if there is none.

    Tensors that have both layouts, such as those of one pixel, get the default one.
    """
    conv, input_node = site.conv, site.input_node
    input_metadata = metadata.get(input_node) if isinstance(input_node, fx.Node) else None
    output_metadata = metadata.get(site.nodes[0])
    if input_metadata is None or output_metadata is None:
        raise ModelError("it did not run on the example")
    if reason := _find_obstacle(conv, input_metadata, output_metadata):
        raise ModelError(reason)
    uses_tf32 = input_metadata.key[3] and output_metadata.dtype is torch.float32
    has_shift = any(fold_affine(affine)[1] is not None for affine in site.affines)
    workload: Any = make_convolution(
        input_metadata.shape,
        tuple(conv.weight.shape),
        stride=tuple(conv.stride),
        padding=resolve_padding(conv, site.pads),
        dilation=tuple(conv.dilation),
        groups=conv.groups,
        dtype=TF32_DTYPE if uses_tf32 else DTYPES[output_metadata.dtype],
        bias=conv.bias is not None or has_shift,
        output_padding=tuple(conv.output_padding) if site.is_transposed else None,
    )
    result: ConvOperator = replace(
        workload, layout=output_metadata.layout or default_layout, epilogue=(*workload.epilogue, *site.epilogue_names)
    )
    return result


def resolve_padding(conv: Any, pads: Sequence[int]) -> tuple[int, ...]:
    """Return the zeros before all axes and then after them, of a convolution and of a padding before it.

    `pads` has the numbers before and after the last axis, then of the axis before it, and so on.
    """
    padding = conv.padding
    if padding == "same":
        totals = [dilation * (size - 1) for dilation, size in zip(conv.dilation, conv.kernel_size, strict=True)]
        low, high = [total // 2 for total in totals], [total - total // 2 for total in totals]
    elif padding == "valid":
        low = high = [0] * len(conv.kernel_size)
    else:
        low = high = list(padding)
    ndim = len(low)
    extra = [*pads, *[0] * (2 * ndim - len(pads))]
    low = [size + extra[2 * (ndim - 1 - axis)] for axis, size in enumerate(low)]
    high = [size + extra[2 * (ndim - 1 - axis) + 1] for axis, size in enumerate(high)]
    return tuple(low) if low == high else (*low, *high)


def _find_obstacle(conv: Any, input_metadata: TensorMetadata, output_metadata: TensorMetadata) -> str:
    """Return the reason why tvmconv's kernels cannot compute a convolution; "" if they can."""
    if isinstance(conv, torch.nn.Module):
        if has_hooks(conv):
            return "the module has hooks"
        if "weight" not in conv._parameters:
            return COMPUTED_WEIGHT_REASON
    if conv.padding_mode != "zeros":
        return f"it pads by {conv.padding_mode}"
    weight = conv.weight
    if weight.layout is not torch.strided or type(weight) not in (torch.nn.Parameter, torch.Tensor):
        return f"its weight is {type(weight).__name__} of {str(weight.layout).removeprefix('torch.')}"
    if weight.is_inference():
        return "its weight is an inference tensor, whose changes cannot be detected"
    if output_metadata.dtype not in DTYPES:
        return f"its dtype is {str(output_metadata.dtype).removeprefix('torch.')}"
    if len(input_metadata.shape) != len(conv.kernel_size) + 2:
        return "its input has no batch axis"
    return ""
