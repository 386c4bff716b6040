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

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from tvmconv.torch import row_operators
from tvmconv.torch.conv_call import KERNEL_DTYPES
from tvmconv.torch.conv_site import TensorMetadata
from tvmconv.torch.fusion_steps import IN_PLACE_ADDS, is_in_place_write, is_sum
from tvmconv.torch.row_kernels import MAX_ROWS, can_normalize
from tvmconv.torch.tensor_layout import compute_strides
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

NORM_NAMES = ("input", "normalized_shape", "weight", "bias", "eps")
NORM_DEFAULTS = {"weight": None, "bias": None, "eps": 1e-5}
ACTIVATION_NAMES = {"none": "gelu", "tanh": "gelu_tanh"}
LINEAR = functional.linear
PRODUCTS = (operator.mul, torch.mul)
BIAS_INDEX = 2  # of the bias among the arguments of convolutions and linear layers
LOW_DTYPES = (torch.float16, torch.bfloat16)
# Operations that make tensors, and those that change them, without reading others that could need gradients.
CREATORS = {"empty", "new_empty", "empty_like", "ones", "new_ones", "rand", "full", "new_full"}
CHANGES = {"bernoulli_", "bernoulli", "div_", "div", "truediv", "mul_", "mul", "floor", "floor_", "add", "add_", "to"}
CHANGES |= {"itruediv", "view", "reshape", "uniform_"}

IsConvolution = Callable[[fx.Node], bool]


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

    def _replace_sum_of(self, node: fx.Node, branch: Any, residual: Any) -> bool:
        found = self._metadata.get(residual)
        if found is None or branch is residual or (node.target in IN_PLACE_ADDS and node.args[0] is residual):
            return False
        z, scale, scale_axis, noise, products = branch, None, None, None, list[fx.Node]()
        while len(products) < 2 and len(z.users) == 1 and (match := self._match_product(z)):
            other, factor, factor_axis = match
            if (scale if factor_axis else noise) is not None:
                break
            if factor_axis:
                scale, scale_axis = factor, factor_axis
            else:
                noise = factor
            products.append(z)
            z = other
        axis = self._find_channel_axis(z, residual)
        if axis is None or scale_axis not in (None, axis) or not self._fits(node, z, residual):
            return False
        bias = self._find_bias(z, axis) if len(z.users) == 1 else None
        if (scale is None and noise is None and bias is None) or (axis != 1 and scale is None and bias is None):
            return False
        read = [(z, products[-1] if products else node), (residual, node)]
        read += [(factor, product) for product in products for factor in (scale, noise) if factor in product.args]
        if self._is_overwritten(read, node):
            return False
        is_channels_last = axis == 1
        bias_node = self._take_bias(bias)
        options = (self._metadata[node].dtype, None, is_channels_last)
        self._insert(node, row_operators.scale_add, (z, bias_node, scale, noise, residual), options)
        for product in products:
            self._graph.erase_node(product)
        return True

    def _match_product(self, node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
        """Return the tensor of a product, its factor, and the axis along which that varies: 0 for random numbers."""
        is_product = (node.op == "call_function" and node.target in PRODUCTS) or (
            node.op == "call_method" and node.target == "mul"
        )
        if not is_product or node.kwargs or len(node.args) != 2:
            return None
        result = self._metadata.get(node)
        for tensor, factor in (node.args, node.args[::-1]):
            found, numbers = (
                self._metadata.get(each) if isinstance(each, fx.Node) else None for each in (tensor, factor)
            )
            if not (result and found and numbers) or found.shape != result.shape or numbers.dtype not in KERNEL_DTYPES:
                continue
            shape = (1,) * (len(found.shape) - len(numbers.shape)) + numbers.shape
            if len(shape) != len(found.shape):
                continue
            axes = [axis for axis, size in enumerate(shape) if size > 1]
            if axes in ([1], [len(shape) - 1]) and axes != [0] and shape[axes[0]] == found.shape[axes[0]]:
                return tensor, factor, axes[0]
            if shape[0] == found.shape[0] and axes in ([0], []) and self._is_random(factor):
                return tensor, factor, 0
        return None

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
        found, other = self._metadata.get(z), self._metadata.get(residual)
        if found is None or other is None or found.shape != other.shape or len(found.shape) < 2:
            return None
        layouts = {found.layout, other.layout} if len(found.shape) > 2 else set()
        if layouts == {CHANNELS_LAST}:
            return 1
        is_contiguous = all(each.stride == compute_strides(each.shape, CHANNELS_FIRST) for each in (found, other))
        return len(found.shape) - 1 if is_contiguous else None

    def _fits(self, node: fx.Node, *operands: fx.Node) -> bool:
        """Return whether a node's result has the shape of its operands, and all have data types of kernels."""
        found = [self._metadata.get(each) for each in (node, *operands)]
        return all(
            each is not None
            and each.dtype in KERNEL_DTYPES
            and found[0] is not None
            and each.shape == found[0].shape
            and 0 < _count_elements(each.shape) // each.shape[-1] < MAX_ROWS
            for each in found
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
            found, bias = self._metadata.get(node), node.args[BIAS_INDEX]
            own_axis = len(found.shape) - 1 if found and is_linear else 1
            has_bias = isinstance(bias, fx.Node) and bias.op == "placeholder" and bias in self._metadata
            return node if has_bias and found and axis == own_axis else None
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
        found, result = self._metadata.get(x), self._metadata.get(node)
        if (
            found is None
            or result is None
            or len(values["normalized_shape"]) != 1
            or len(found.shape) < 2
            or found.stride != compute_strides(found.shape, CHANNELS_FIRST)
            or not self._fits(node, x)
            or not can_normalize(found.shape[-1], min(found.dtype, result.dtype, key=lambda dtype: dtype.itemsize))
        ):
            return False
        bias = self._take_bias(self._find_bias(x, len(found.shape) - 1))
        operands = (x, bias, values["weight"], values["bias"])
        self._insert(node, row_operators.layer_norm, (*operands, values["eps"]), (result.dtype, None))
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
        is_product = node.target in PRODUCTS if node.op == "call_function" else node.target == "mul"
        if not is_product or node.kwargs or len(node.args) != 2:
            return False
        result = self._metadata.get(node)
        for x, s in (node.args, node.args[::-1]):
            found, numbers = (self._metadata.get(each) if isinstance(each, fx.Node) else None for each in (x, s))
            if (
                result
                and found
                and numbers
                and len(found.shape) > 2
                and found.layout == CHANNELS_LAST
                and numbers.shape == (*found.shape[:2], *(1,) * (len(found.shape) - 2))
                and numbers.dtype in KERNEL_DTYPES
                and (result.dtype, result.shape) == (found.dtype, found.shape)
                and self._fits(node, x)
            ):
                with self._graph.inserting_before(node):
                    new = self._graph.call_function(row_operators.gate, (x, s))
                self._replace_node(node, new)
                return True
        return False

    def _is_overwritten(self, read: Sequence[tuple[fx.Node, fx.Node]], last: fx.Node) -> bool:
        """Return whether a node may write to tensors after the nodes that read them, before a last node reads them."""
        order = {node: number for number, node in enumerate(self._graph.nodes)}
        for tensor, reader in read:
            own = self._metadata.get(tensor)
            for node in list(order)[order[reader] + 1 : order[last]]:
                if not is_in_place_write(node, {}):
                    continue
                target = node.args[0] if node.args else None
                written = self._metadata.get(target) if isinstance(target, fx.Node) else None
                if own is None or written is None or "out" in node.kwargs or written.memory == own.memory:
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
        found = self._metadata.get(node)
        if found is None or found.dtype is not torch.float32:
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
        found = self._metadata.get(reader)
        return is_input and is_layer and found is not None and found.dtype in LOW_DTYPES

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


def _count_elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def fuse_rows(gm: fx.GraphModule, metadata: Any, is_convolution: IsConvolution) -> fx.GraphModule:
    """Return a copy of a graph in which operators compute what they can; the graph itself if that is nothing."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    copied_metadata = {copies[node]: found for node, found in metadata.items() if node in copies}
    fusion = RowFusion(graph, copied_metadata, is_convolution)
    fusion.run()
    if not fusion.num_replaced:
        return gm
    graph.lint()
    return fx.GraphModule(gm, graph)
