"""The match of a model's convolutions with workloads, by its graphs and a run on the example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tvmconv.errors import ModelError, WorkloadError
from tvmconv.models.model_graph import make_convolution
from tvmconv.torch.fusion import FusionSite, find_fusion_sites, has_hooks, replace_sites
from tvmconv.torch.layer import CONVOLUTIONS, InputKey, make_input_key
from tvmconv.torch.model import Optimized
from tvmconv.torch.partition import GraphPartition
from tvmconv.torch.signature import MEMORY_FORMATS
from tvmconv.workloads import Conv
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
TF32_DTYPE = "tf32"
ROOT_PATH = "(itself)"  # path of a model that is itself a convolution


@dataclass(frozen=True)
class TensorMetadata:
    """Shape, strides and dtype of the tensor that a graph node produced.

    Attributes:
        shape: Shape of the tensor.
        stride: Strides of the tensor, in elements.
        dtype: Dtype of the tensor.
        key: Key of kernels that can take the tensor as input.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    key: InputKey

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorMetadata:
        """Return the metadata of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, make_input_key(tensor))

    def make_random_like(self) -> torch.Tensor:
        """Return a tensor of random numbers with this shape, dtype and these strides; expanded axes repeat their
        numbers.
        """
        num_elements = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        random_numbers = torch.randn(num_elements, dtype=torch.float32, device=self.key[2])
        return random_numbers.to(self.dtype).as_strided(self.shape, self.stride)

    @property
    def layout(self) -> str | None:
        """Layout of the tensor; None if it has both layouts or neither."""
        channels_last_format = MEMORY_FORMATS.get(len(self.shape) - 2)
        if channels_last_format is None:
            return CHANNELS_FIRST
        meta = torch.empty_strided(self.shape, self.stride, device="meta")
        is_channels_first, is_channels_last = (
            meta.is_contiguous(),
            meta.is_contiguous(memory_format=channels_last_format),
        )
        if is_channels_first == is_channels_last:
            return None
        return CHANNELS_LAST if is_channels_last else CHANNELS_FIRST


@dataclass
class ConvMatch:
    """A convolution of a model with its workload.

    Attributes:
        path: Path of its module in the model.
        workload_text: Text of its workload with the epilogue; "" if tvmconv's kernels cannot compute it.
        reason: Reason why they cannot.
        module: Module that computes it in the optimized model; None if PyTorch does.
        input_metadata: Metadata of its input.
        residual: Metadata of the residual, if there is one.
        site: Its location in the graph.
    """

    path: str
    workload_text: str = ""
    reason: str = ""
    module: Any = None
    input_metadata: TensorMetadata | None = None
    residual: TensorMetadata | None = None
    site: FusionSite | None = None


class ShapeRecorder(fx.Interpreter):
    """An interpreter that runs a graph and records the metadata of its nodes."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.metadata: dict[fx.Node, TensorMetadata] = {}
        self._named_arguments: dict[str, Any] = {}

    def run_with_arguments(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on positional and keyword arguments."""
        self._named_arguments = kwargs
        return self.run(*args)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return an argument."""
        return (
            self._named_arguments[target]
            if target in self._named_arguments
            else super().placeholder(target, args, kwargs)
        )

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and record the metadata of its result."""
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.metadata[n] = TensorMetadata.from_tensor(result)
        return result


def match_convolutions(
    model: Optimized, partitions: Sequence[GraphPartition], arguments: Sequence[Any]
) -> list[ConvMatch]:
    """Match the convolutions of a model in a run on the example; replace those that have a workload.

    Args:
        model: The model.
        partitions: Its traced parts.
        arguments: Arguments of the model.

    Returns:
        All convolutions of the model, in the order of the graphs.
    """
    recorders = []
    for partition in partitions:
        recorders.append(ShapeRecorder(partition.module.graph))
        partition.module.set_interpreter(recorders[-1].run_with_arguments)
    with torch.no_grad():
        model(*arguments)
    matches: list[ConvMatch] = []
    for partition, recorder in zip(partitions, recorders, strict=True):
        partition.module.set_interpreter(None)
        matches += _replace_convolutions(partition, recorder.metadata)
    matched_paths = {conv_match.path for conv_match in matches}
    for path, module in model.named_modules():
        if isinstance(module, tuple(CONVOLUTIONS)) and (path or ROOT_PATH) not in matched_paths:
            reason = "it did not run on the example, or it is in a module with hooks or a subclass of a convolution"
            matches.append(ConvMatch(path, reason=reason))
    return matches


def _replace_convolutions(partition: GraphPartition, metadata: dict[fx.Node, TensorMetadata]) -> list[ConvMatch]:
    """Match the convolutions of one part and replace those that have a workload."""
    sites = list(
        find_fusion_sites(
            partition.module.graph,
            {
                node: (node_metadata.layout, node_metadata.shape, node_metadata.dtype)
                for node, node_metadata in metadata.items()
            },
        )
    )
    layouts = [
        node_metadata.layout
        for site in sites
        if (node_metadata := metadata.get(site.nodes[0])) and node_metadata.layout
    ]
    default_layout = max(layouts, key=layouts.count, default=CHANNELS_FIRST)
    matches, supported = [], []
    for site in sites:
        conv_match = ConvMatch(f"{partition.path}.{site.path}".strip(".") or ROOT_PATH)
        try:
            conv_match.workload_text = _make_workload(site, metadata, default_layout).text
        except (WorkloadError, ModelError) as error:
            conv_match.reason = str(error)
        else:
            supported.append((conv_match, site))
            conv_match.input_metadata = metadata[site.nodes[0].args[0]]
            conv_match.residual = None if site.residual is None else metadata[site.residual]
        matches.append(conv_match)
    replace_sites(partition.module.graph, [site for _, site in supported])
    for conv_match, site in supported:
        conv_match.module, conv_match.site = site.module, site
    return matches


def _make_workload(site: FusionSite, metadata: dict[fx.Node, TensorMetadata], default_layout: str) -> Conv:
    """Return the workload of a site.

    Raises:
        ModelError: tvmconv's kernels cannot compute it, for the reason in the message.
        WorkloadError: There is no such workload.
    """
    conv, nodes = site.conv, site.nodes
    input_node = nodes[0].args[0]
    input_metadata = metadata.get(input_node) if isinstance(input_node, fx.Node) else None
    output_metadata = metadata.get(nodes[0])
    if input_metadata is None or output_metadata is None:
        raise ModelError("it did not run on the example")
    reason = _find_obstacle(conv, input_metadata, output_metadata)
    if reason:
        raise ModelError(reason)
    padding = conv.padding
    if padding == "same":
        total_padding = [dilation * (size - 1) for dilation, size in zip(conv.dilation, conv.kernel_size, strict=True)]
        padding = (
            *(axis_padding // 2 for axis_padding in total_padding),
            *(axis_padding - axis_padding // 2 for axis_padding in total_padding),
        )
    elif padding == "valid":
        padding = (0,) * len(conv.kernel_size)
    workload: Any = make_convolution(
        input_metadata.shape,
        tuple(conv.weight.shape),
        stride=tuple(conv.stride),
        padding=tuple(padding),
        dilation=tuple(conv.dilation),
        groups=conv.groups,
        dtype=TF32_DTYPE
        if input_metadata.key[3] and output_metadata.dtype is torch.float32
        else DTYPES[output_metadata.dtype],
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
