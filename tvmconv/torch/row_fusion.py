"""Layer normalizations and element-wise operations in graphs with gradients that no compiler fuses.

Each of these runs of PyTorch's operations becomes one operator of `row_operators.py`:

| operations | operator |
| --- | --- |
| layer normalization over the last axis | `layer_norm` |
| GELU after a convolution or linear layer with bias | `activate` |
| products with one number per channel or sample, and a sum; sum of a layer with bias and a tensor | `scale_add` |
| product of images with one number for each channel of each sample, as in squeeze and excitation | `gate` |

An operator takes the bias of the convolution or linear layer before it, which then computes none. Under autocast, a
convolution or linear layer behind `layer_norm` or `scale_add` reads the result in 16 bits that the operator stores.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from tvmconv.torch import row_operators
from tvmconv.torch.conv_call import KERNEL_DTYPES
from tvmconv.torch.conv_site import TensorMetadata
from tvmconv.torch.fusion_steps import IN_PLACE_ADDS, is_in_place_write, is_product, is_sum
from tvmconv.torch.row_kernels import MAX_ROWS, can_normalize
from tvmconv.torch.tensor_layout import compute_strides
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

NORM_NAMES = ("input", "normalized_shape", "weight", "bias", "eps")
NORM_DEFAULTS = {"weight": None, "bias": None, "eps": 1e-5}
ACTIVATION_NAMES = {"none": "gelu", "tanh": "gelu_tanh"}
LINEAR = functional.linear
BIAS_INDEX = 2  # of the bias among the arguments of convolutions and linear layers
LOW_DTYPES = (torch.float16, torch.bfloat16)
# Operations that make tensors, and those that change them, without reading others that could need gradients.
CREATORS = {"empty", "new_empty", "empty_like", "ones", "new_ones", "rand", "full", "new_full"}
CHANGES = {"bernoulli_", "bernoulli", "div_", "div", "truediv", "mul_", "mul", "floor", "floor_", "add", "add_", "to"}
CHANGES |= {"itruediv", "view", "reshape", "uniform_"}

IsConvolution = Callable[[fx.Node], bool]


@dataclass
class _ScaledTerm:
    """The operand z * scale * noise of a sum."""

    z: fx.Node
    scale: fx.Node | None = None  # one number per channel
    scale_axis: int | None = None  # axis of the channels
    noise: fx.Node | None = None  # one random number per sample
    products: list[fx.Node] = field(default_factory=list)  # nodes of the products, the last one first


class RowFusion:
    """The replacement of operations in a graph.

    Args:
        graph: The graph, which is changed.
        metadata: Metadata of the results of its nodes in a run; that of new nodes is added.
        is_convolution: Function that returns whether a node is a convolution, possibly a transposed one.
    """

    def __init__(self, graph: fx.Graph, metadata: dict[fx.Node, TensorMetadata], is_convolution: IsConvolution) -> None:
        self._graph, self._metadata, self._is_convolution = graph, metadata, is_convolution
        self.num_replaced = 0

    def run(self) -> None:
        """Replace all operations that operators can compute."""
        for replace in (self._replace_sum, self._replace_norm, self._replace_activation, self._replace_gate):
            for node in list(self._graph.nodes):
                if node.op in ("call_function", "call_method") and replace(node):
                    self.num_replaced += 1

    def _replace_sum(self, node: fx.Node) -> bool:
        """Replace a sum, and the products before it, by `scale_add`; return whether that is possible."""
        if not is_sum(node) or not all(isinstance(arg, fx.Node) for arg in node.args):
            return False
        first, second = node.args
        return self._replace_sum_of(node, first, second) or self._replace_sum_of(node, second, first)

    def _replace_sum_of(self, node: fx.Node, operand: Any, residual: Any) -> bool:
        is_overwriting = node.target in IN_PLACE_ADDS and node.args[0] is residual
        if residual not in self._metadata or operand is residual or is_overwriting:
            return False
        term = self._match_scaled_term(operand)
        z, scale, noise = term.z, term.scale, term.noise
        axis = self._find_channel_axis(z, residual)
        if axis is None or term.scale_axis not in (None, axis) or not self._fits(node, z, residual):
            return False
        bias_layer = self._find_bias(z, axis) if len(z.users) == 1 else None
        if scale is None and bias_layer is None and (noise is None or axis != 1):
            return False
        read = [(z, term.products[-1] if term.products else node), (residual, node)]
        read += [(factor, product) for product in term.products for factor in (scale, noise) if factor in product.args]
        if self._is_overwritten(read, node):
            return False
        options = (self._metadata[node].dtype, None, axis == 1)
        operands = (z, self._take_bias(bias_layer), scale, noise, residual)
        self._insert(node, row_operators.scale_add, operands, options)
        for product in term.products:
            self._graph.erase_node(product)
        return True

    def _match_scaled_term(self, node: fx.Node) -> _ScaledTerm:
        """Return a tensor and the products behind it whose result is a node, which may be the tensor itself."""
        term = _ScaledTerm(node)
        while len(term.products) < 2 and len(term.z.users) == 1 and (match := self._match_product(term.z)):
            tensor, factor, axis = match
            if (term.scale if axis else term.noise) is not None:
                break
            if axis:
                term.scale, term.scale_axis = factor, axis
            else:
                term.noise = factor
            term.products.append(term.z)
            term.z = tensor
        return term

    def _match_product(self, node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
        """Return the tensor of a product, its factor, and the axis along which that varies: 0 for random numbers."""
        if not is_product(node):
            return None
        product_info = self._metadata.get(node)
        for tensor, factor in (node.args, node.args[::-1]):
            tensor_info, factor_info = self._get_metadata(tensor), self._get_metadata(factor)
            if not (product_info and tensor_info and factor_info) or tensor_info.shape != product_info.shape:
                continue
            ndim = len(tensor_info.shape)
            shape = (1,) * (ndim - len(factor_info.shape)) + factor_info.shape
            if factor_info.dtype not in KERNEL_DTYPES or len(shape) != ndim:
                continue
            axes = [axis for axis, size in enumerate(shape) if size > 1]
            if axes in ([1], [ndim - 1]) and axes != [0] and shape[axes[0]] == tensor_info.shape[axes[0]]:
                return tensor, factor, axes[0]
            if shape[0] == tensor_info.shape[0] and axes in ([0], []) and self._is_random(factor):
                return tensor, factor, 0
        return None

    def _get_metadata(self, value: Any) -> TensorMetadata | None:
        """Return the metadata of an argument; None for constants, and nodes whose result is no tensor."""
        return self._metadata.get(value) if isinstance(value, fx.Node) else None

    def _is_random(self, node: fx.Node) -> bool:
        """Return whether a node's value is made of random numbers only, and therefore needs no gradient."""
        waiting, seen = [node], set[fx.Node]()
        while waiting:
            each = waiting.pop()
            name = str(each.target) if each.op == "call_method" else getattr(each.target, "__name__", "")
            seen.add(each)
            if each.op not in ("call_function", "call_method") or len(seen) > 16:
                return False
            if name in CREATORS:
                continue
            if name not in CHANGES:
                return False
            waiting += [argument for argument in each.all_input_nodes if argument not in seen]
        return True

    def _find_channel_axis(self, z: fx.Node, residual: fx.Node) -> int | None:
        """Return the axis of neighbouring channels in the memory of two tensors; None if there is none."""
        z_info, residual_info = self._metadata.get(z), self._metadata.get(residual)
        if z_info is None or residual_info is None or z_info.shape != residual_info.shape or len(z_info.shape) < 2:
            return None
        layouts = {z_info.layout, residual_info.layout} if len(z_info.shape) > 2 else set()
        if layouts == {CHANNELS_LAST}:
            return 1
        infos = (z_info, residual_info)
        is_contiguous = all(info.stride == compute_strides(info.shape, CHANNELS_FIRST) for info in infos)
        return len(z_info.shape) - 1 if is_contiguous else None

    def _fits(self, node: fx.Node, *operands: fx.Node) -> bool:
        """Return whether a node's result has the shape of its operands, and all have data types of kernels."""
        infos = [self._metadata.get(info) for info in (node, *operands)]
        return all(
            info is not None
            and info.dtype in KERNEL_DTYPES
            and infos[0] is not None
            and info.shape == infos[0].shape
            and 0 < math.prod(info.shape) // info.shape[-1] < MAX_ROWS
            for info in infos
        )

    def _find_bias(self, node: fx.Node, axis: int) -> fx.Node | None:
        """Return the layer with a bias along an axis of a node's tensor, which nothing else reads; None without one."""
        while node.op in ("call_function", "call_method"):
            if len(node.users) != 1:
                return None
            if (dims := _get_permutation(node)) is not None:
                (node, *_), axis = node.args, dims[axis]
                continue
            if _is_identity(node):
                node = node.args[0]
                continue
            is_linear = node.target is LINEAR
            if not (is_linear or self._is_convolution(node)) or len(node.args) <= BIAS_INDEX or node.kwargs:
                return None
            layer_info, bias = self._metadata.get(node), node.args[BIAS_INDEX]
            own_axis = len(layer_info.shape) - 1 if layer_info and is_linear else 1
            has_bias = isinstance(bias, fx.Node) and bias.op == "placeholder" and bias in self._metadata
            return node if has_bias and layer_info and axis == own_axis else None
        return None

    def _take_bias(self, layer: fx.Node | None) -> fx.Node | None:
        """Remove the bias of a layer, and return it."""
        if layer is None:
            return None
        bias: fx.Node = layer.args[BIAS_INDEX]
        layer.update_arg(BIAS_INDEX, None)
        return bias

    def _replace_norm(self, node: fx.Node) -> bool:
        """Replace a layer normalization; return whether that is possible."""
        if node.target is not functional.layer_norm:
            return False
        values = {**NORM_DEFAULTS, **dict(zip(NORM_NAMES, node.args, strict=False)), **node.kwargs}
        x = values["input"]
        x_info, norm_info = self._metadata.get(x), self._metadata.get(node)
        if (
            x_info is None
            or norm_info is None
            or len(values["normalized_shape"]) != 1
            or len(x_info.shape) < 2
            or x_info.stride != compute_strides(x_info.shape, CHANNELS_FIRST)
            or not self._fits(node, x)
            or not can_normalize(x_info.shape[-1], min(x_info.dtype, norm_info.dtype, key=lambda dtype: dtype.itemsize))
        ):
            return False
        bias = self._take_bias(self._find_bias(x, len(x_info.shape) - 1))
        operands = (x, bias, values["weight"], values["bias"])
        self._insert(node, row_operators.layer_norm, (*operands, values["eps"]), (norm_info.dtype, None))
        return True

    def _replace_activation(self, node: fx.Node) -> bool:
        """Replace a GELU after a layer with bias; return whether that is possible."""
        if node.target is not functional.gelu or not node.args or not isinstance(node.args[0], fx.Node):
            return False
        x = node.args[0]
        axis = self._find_channel_axis(x, x)
        layer = None if axis is None or len(x.users) > 1 or not self._fits(node, x) else self._find_bias(x, axis)
        approximation = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
        if layer is None or self._metadata[node].dtype is not self._metadata[x].dtype:
            return False
        with self._graph.inserting_before(node):
            arguments = (x, self._take_bias(layer), ACTIVATION_NAMES[approximation], axis == 1)
            new = self._graph.call_function(row_operators.activate, arguments)
        self._replace_node(node, new)
        return True

    def _replace_gate(self, node: fx.Node) -> bool:
        """Replace a product of images with numbers of their channels and samples; return whether that is possible."""
        if not is_product(node):
            return False
        for x, s in (node.args, node.args[::-1]):
            if self._is_gate(node, x, s):
                with self._graph.inserting_before(node):
                    new = self._graph.call_function(row_operators.gate, (x, s))
                self._replace_node(node, new)
                return True
        return False

    def _is_gate(self, node: fx.Node, x: Any, s: Any) -> bool:
        """Return whether a node is the product of channels-last images and of one number per channel and sample."""
        product_info, image_info, factor_info = (self._get_metadata(each) for each in (node, x, s))
        if not (product_info and image_info and factor_info):
            return False
        shape = image_info.shape
        return (
            len(shape) > 2
            and image_info.layout == CHANNELS_LAST
            and factor_info.shape == (*shape[:2], *(1,) * (len(shape) - 2))
            and factor_info.dtype in KERNEL_DTYPES
            and (product_info.dtype, product_info.shape) == (image_info.dtype, shape)
            and self._fits(node, x)
        )

    def _is_overwritten(self, read: Sequence[tuple[fx.Node, fx.Node]], last: fx.Node) -> bool:
        """Return whether a node may write to tensors after the nodes that read them, before a last node reads them."""
        order = {node: number for number, node in enumerate(self._graph.nodes)}
        for tensor, reader in read:
            read_info = self._metadata.get(tensor)
            for node in list(order)[order[reader] + 1 : order[last]]:
                if not is_in_place_write(node, {}):
                    continue
                written_info = self._get_metadata(node.args[0] if node.args else None)
                if read_info is None or written_info is None or "out" in node.kwargs:
                    return True
                if written_info.memory == read_info.memory:
                    return True
        return False

    def _insert(self, node: fx.Node, target: Any, arguments: tuple[Any, ...], options: tuple[Any, ...]) -> None:
        """Replace a node by an operator with a result in one or two data types.

        Args:
            node: The node.
            target: The operator.
            arguments: Its first arguments.
            options: Its other arguments: the data types of both results, and more.
        """
        dtype, _, *rest = options
        low_dtypes = {self._metadata[reader].dtype for reader in self._list_casting_readers(node)}
        low_dtype = low_dtypes.pop() if len(low_dtypes) == 1 else None
        with self._graph.inserting_before(node):
            pair = self._graph.call_function(target, (*arguments, dtype, low_dtype, *rest))
            result = self._graph.call_function(operator.getitem, (pair, 0))
            low = None if low_dtype is None else self._graph.call_function(operator.getitem, (pair, 1))
        self._replace_node(node, result)
        if low is not None:
            self._move_casting_readers(result, low)
            if not result.users:
                self._graph.erase_node(result)
                pair.args = (*arguments, None, low_dtype, *rest)

    def _replace_node(self, node: fx.Node, new: fx.Node) -> None:
        self._metadata[new] = self._metadata[node]
        node.replace_all_uses_with(new)
        self._graph.erase_node(node)

    def _list_casting_readers(self, node: fx.Node) -> list[fx.Node]:
        """Return the layers that read a float32 tensor, or a permutation of it, and cast it under autocast."""
        node_info = self._metadata.get(node)
        if node_info is None or node_info.dtype is not torch.float32:
            return []
        readers = []
        for reader in node.users:
            if _get_permutation(reader) is not None:
                readers += self._list_casting_readers(reader)
            elif self._is_casting(reader, node):
                readers.append(reader)
        return readers

    def _is_casting(self, reader: fx.Node, node: fx.Node) -> bool:
        is_input = bool(reader.args) and reader.args[0] is node and node not in reader.args[1:]
        is_layer = reader.target is LINEAR or self._is_convolution(reader)
        reader_info = self._metadata.get(reader)
        return is_input and is_layer and reader_info is not None and reader_info.dtype in LOW_DTYPES

    def _move_casting_readers(self, node: fx.Node, low: fx.Node) -> None:
        """Have layers that cast a tensor, or a permutation of it, read it in 16 bits."""
        for reader in list(node.users):
            if self._is_casting(reader, node):
                reader.update_arg(0, low)
            elif (dims := _get_permutation(reader)) is not None and self._list_casting_readers(reader):
                with self._graph.inserting_before(reader):
                    view = self._graph.call_function(torch.permute, (low, dims))
                self._move_casting_readers(reader, view)
                if not reader.users:
                    self._graph.erase_node(reader)


def _is_identity(node: fx.Node) -> bool:
    """Return whether a node is a dropout with the probability 0, as models have it by default."""
    probability = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else None)
    return node.target is functional.dropout and bool(node.args) and probability == 0.0


def _get_permutation(node: fx.Node) -> list[int] | None:
    """Return the order of axes that a node makes of its argument; None for other nodes."""
    is_permutation = node.target is torch.permute or (node.op == "call_method" and node.target == "permute")
    if not is_permutation or node.kwargs or len(node.args) < 2:
        return None
    dims = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], Sequence) else node.args[1:]
    return [dim % len(dims) for dim in dims] if all(isinstance(dim, int) for dim in dims) else None


def fuse_rows(gm: fx.GraphModule, metadata: Any, is_convolution: IsConvolution) -> fx.GraphModule:
    """Return a copy of a graph in which operators compute what they can; the graph itself if that is nothing."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    copied_metadata = {copies[node]: info for node, info in metadata.items() if node in copies}
    fusion = RowFusion(graph, copied_metadata, is_convolution)
    fusion.run()
    if not fusion.num_replaced:
        return gm
    graph.lint()
    return fx.GraphModule(gm, graph)
