"""The match of a model's convolutions with workloads, by its graphs and a run on the example."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tvmconv.errors import ModelError, WorkloadError
from tvmconv.models.model_graph import make_convolution
from tvmconv.torch.fusion import ConvSite, TensorMetadata, find_fusion_sites, has_hooks, replace_sites
from tvmconv.torch.layer import CONVOLUTIONS
from tvmconv.torch.model import Optimized
from tvmconv.torch.partition import GraphPartition
from tvmconv.workloads import Conv
from tvmconv.workloads.layout import CHANNELS_FIRST

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
TF32_DTYPE = "tf32"
ROOT_PATH = "(itself)"  # path of a model that is itself a convolution
NOT_RUN_REASON = "it did not run on the example, or it is in a module with hooks or a subclass of a convolution"


class ShapeRecorder(fx.Interpreter):
    """An interpreter that runs a graph and records the metadata of its nodes."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.metadata: dict[fx.Node, TensorMetadata] = {}

    def run_with_arguments(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on positional and keyword arguments."""
        arguments = inspect.signature(self.module.forward).bind(*args, **kwargs)
        arguments.apply_defaults()
        return self.run(*arguments.args)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and record the metadata of its result."""
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.metadata[n] = TensorMetadata.from_tensor(result)
        return result


def match_convolutions(
    model: Optimized, partitions: Sequence[GraphPartition], arguments: Sequence[Any]
) -> list[ConvSite]:
    """Match the convolutions of a model in a run on the example; replace those that have a workload.

    Returns all convolutions of the model, in the order of the graphs of its traced parts.
    """
    recorders = [ShapeRecorder(partition.module.graph) for partition in partitions]
    for partition, recorder in zip(partitions, recorders, strict=True):
        partition.module.interpreter = recorder.run_with_arguments
    with torch.no_grad():
        model(*arguments)
    sites: list[ConvSite] = []
    for partition, recorder in zip(partitions, recorders, strict=True):
        partition.module.interpreter = None
        sites += _replace_convolutions(partition, recorder.metadata)
    matched_paths = {site.path for site in sites}
    for path, module in model.named_modules():
        if isinstance(module, tuple(CONVOLUTIONS)) and (path or ROOT_PATH) not in matched_paths:
            sites.append(ConvSite(path, reason=NOT_RUN_REASON))
    return sites


def _replace_convolutions(partition: GraphPartition, metadata: dict[fx.Node, TensorMetadata]) -> list[ConvSite]:
    """Match the convolutions of one part and replace those that have a workload."""
    sites = list(find_fusion_sites(partition.module.graph, metadata))
    layouts = [metadata[site.nodes[0]].layout for site in sites if site.nodes[0] in metadata]
    known_layouts = [layout for layout in layouts if layout]
    default_layout = max(known_layouts, key=known_layouts.count, default=CHANNELS_FIRST)
    for site in sites:
        site.path = f"{partition.path}.{site.path}".strip(".") or ROOT_PATH
        try:
            site.workload_text = _make_workload(site, metadata, default_layout).text
        except (WorkloadError, ModelError) as error:
            site.reason = str(error)
        else:
            site.input_metadata = metadata[site.nodes[0].args[0]]
            site.residual_metadata = None if site.residual is None else metadata[site.residual]
    replace_sites(partition.module.graph, [site for site in sites if site.workload_text])
    return sites


def _make_workload(site: ConvSite, metadata: dict[fx.Node, TensorMetadata], default_layout: str) -> Conv:
    """Return the workload of a site; raise ModelError with the reason if tvmconv's kernels cannot compute it."""
    conv = site.conv
    input_node = site.nodes[0].args[0]
    input_metadata = metadata.get(input_node) if isinstance(input_node, fx.Node) else None
    output_metadata = metadata.get(site.nodes[0])
    if input_metadata is None or output_metadata is None:
        raise ModelError("it did not run on the example")
    if reason := _find_obstacle(conv, input_metadata, output_metadata):
        raise ModelError(reason)
    padding = conv.padding
    if padding == "same":
        totals = [dilation * (size - 1) for dilation, size in zip(conv.dilation, conv.kernel_size, strict=True)]
        padding = (*(total // 2 for total in totals), *(total - total // 2 for total in totals))
    elif padding == "valid":
        padding = (0,) * len(conv.kernel_size)
    uses_tf32 = input_metadata.key[3] and output_metadata.dtype is torch.float32
    workload: Any = make_convolution(
        input_metadata.shape,
        tuple(conv.weight.shape),
        stride=tuple(conv.stride),
        padding=tuple(padding),
        dilation=tuple(conv.dilation),
        groups=conv.groups,
        dtype=TF32_DTYPE if uses_tf32 else DTYPES[output_metadata.dtype],
        bias=conv.bias is not None or site.norm is not None,
    )
    return replace(
        workload, layout=output_metadata.layout or default_layout, epilogue=(*workload.epilogue, *site.epilogue_names)
    )


def _find_obstacle(conv: Any, input_metadata: TensorMetadata, output_metadata: TensorMetadata) -> str:
    """Return the reason why tvmconv's kernels cannot compute a convolution; "" if they can."""
    if has_hooks(conv):
        return "the module has hooks"
    if "weight" not in conv._parameters:
        return "its weight is computed"
    if conv.padding_mode != "zeros":
        return f"it pads by {conv.padding_mode}"
    weight = conv.weight
    if type(weight) is not torch.nn.Parameter or weight.layout is not torch.strided:
        return f"its weight is {type(weight).__name__} of {str(weight.layout).removeprefix('torch.')}"
    if weight.is_inference():
        return "its weight is an inference tensor, whose changes cannot be detected"
    if output_metadata.dtype not in DTYPES:
        return f"its dtype is {str(output_metadata.dtype).removeprefix('torch.')}"
    if len(input_metadata.shape) != CONVOLUTIONS[type(conv)] + 2:
        return "its input has no batch axis"
    return ""
