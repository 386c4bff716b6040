"""A convolution of a traced graph with the operations after it that one kernel computes, and what tensors it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tvmconv.torch.graph_constants import GraphConstant
from tvmconv.torch.layer import InputKey, TunedConv, make_input_key
from tvmconv.torch.tensor_layout import find_layout


@dataclass(frozen=True)
class TensorMetadata:
    """Shape, strides in elements and dtype of the tensor that a graph node produced."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    key: InputKey  # of kernels that can take the tensor as input
    memory: int = field(default=0, compare=False, repr=False)  # a number that tensors with the same memory share

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, memory: int = 0) -> TensorMetadata:
        """Return the metadata of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, make_input_key(tensor), memory)

    def make_random_like(self) -> torch.Tensor:
        """Return random numbers with this shape, dtype and these strides; expanded axes repeat their numbers."""
        num_elements = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        random_numbers = torch.randn(num_elements, dtype=torch.float32, device=self.key[2])
        return random_numbers.to(self.dtype).as_strided(self.shape, self.stride)

    @property
    def layout(self) -> str | None:
        """Layout of the tensor; None if it has both layouts or neither."""
        return find_layout(self.shape, self.stride)


Metadata = Mapping[fx.Node, TensorMetadata]


@dataclass
class ConvSite:
    """A convolution of a model, with the operations around it in the graph that one kernel computes with it."""

    path: str  # path of the convolution's module in the model
    conv: Any = None  # the model's module, or another object of `tvmconv.torch.conv_source`
    nodes: list[fx.Node] = field(default_factory=list)  # nodes of all operations, the convolution first
    pad_nodes: list[fx.Node] = field(default_factory=list)  # nodes before it that pad with zeros, the last one first
    pads: tuple[int, ...] = ()  # zeros that they add, as `functional.pad` takes them
    affines: list[Any] = field(default_factory=list)  # operations that weight and bias include, such as normalizations
    epilogue_names: list[str] = field(default_factory=list)  # names of the other operations, with `add` at most once
    slope: GraphConstant | None = None  # slopes of `prelu`
    add_node: fx.Node | None = None  # node that adds a residual, if there is one
    followed_by: str = ""  # name of the next activation, normalization or sum, if it is not fused
    missed_reason: str = ""  # reason why it is not
    former_names: str = ""  # names of the operations in the model, such as `Conv2d + BatchNorm2d`
    workload_text: str = ""  # text of its workload with the epilogue; "" if tvmconv's kernels cannot compute it
    reason: str = ""  # reason why they cannot
    output_layout: str | None = None  # layout that its output has to have; None if that is not decided
    module: Any = None  # module that computes the site in the optimized model; None if PyTorch does
    input_metadata: Any = None  # `TensorMetadata` of its input
    residual_metadata: Any = None  # `TensorMetadata` of the residual, if there is one

    @property
    def input_node(self) -> Any:
        """Node of the input in the current graph, before zero padding."""
        node = self.pad_nodes[-1] if self.pad_nodes else self.nodes[0]
        return node.args[0] if node.args else node.kwargs["input"]

    def list_private_pad_nodes(self) -> list[fx.Node]:
        """Return the nodes of zero padding whose results only this site reads, the last one first."""
        private: list[fx.Node] = []
        for node in self.pad_nodes:
            if not {*node.users} <= {self.nodes[0], *private}:
                break
            private.append(node)
        return private

    @property
    def residual(self) -> fx.Node | None:
        """Node of the added tensor in the current graph; None if there is none."""
        if self.add_node is None:
            return None
        return next(arg for arg in self.add_node.args if isinstance(arg, fx.Node) and arg not in self.nodes)

    @property
    def is_transposed(self) -> bool:
        """Whether the convolution is transposed."""
        return bool(self.conv.transposed)

    def make_module(self) -> TunedConv:
        """Return a module that computes the site."""
        return TunedConv(
            self.conv, self.affines, self.epilogue_names, self.output_layout, slope=self.slope, pads=self.pads
        )
