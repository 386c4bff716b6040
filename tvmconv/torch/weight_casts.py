"""Casts of all weights of a graph under autocast at once.

Autocast converts each weight to float16 or bfloat16 before its convolution, and each gradient back. Compilers write one
kernel for each of them, and a small one takes as long as its launch. The operator `tvmconv::cast_all` converts lists of
tensors in a few kernels of PyTorch's, and is its own gradient. The compiled backward pass returns all gradients at its
end, so that none of them comes later.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tvmconv.torch.operator_library import define_operator

WEIGHT_INDEX = 1  # of the weight among the arguments of a convolution or linear layer


def merge_weight_casts(
    graph: fx.Graph, layers: Mapping[fx.Node, torch.dtype], inputs: Mapping[fx.Node, torch.Tensor]
) -> None:
    """Have convolutions and linear layers of a graph read weights that one operator has cast.

    A weight is an input that needs a gradient, and which nothing but these layers reads, in one dtype.

    Args:
        graph: The graph, which is changed.
        layers: Dtypes in which layers compute whose weights may be cast.
        inputs: Inputs of the graph by their nodes.
    """
    readers: dict[fx.Node, list[tuple[fx.Node, torch.dtype]]] = {}
    for node, dtype in layers.items():
        weight = node.args[WEIGHT_INDEX] if len(node.args) > WEIGHT_INDEX else None
        if isinstance(weight, fx.Node):
            readers.setdefault(weight, []).append((node, dtype))
    by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[fx.Node]] = {}
    for weight, layers_of_weight in readers.items():
        value, (dtype, *others) = inputs.get(weight), dict.fromkeys(dtype for _, dtype in layers_of_weight)
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if value is None or others or not (is_plain and value.requires_grad and value.is_floating_point()):
            continue
        if value.dtype is not dtype and set(weight.users) == {node for node, _ in layers_of_weight}:
            by_dtypes.setdefault((value.dtype, dtype), []).append(weight)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for (_, dtype), group in by_dtypes.items():
        with graph.inserting_after(placeholders[-1]):
            cast = graph.call_function(cast_all, (group, dtype))
        for index, weight in reversed([*enumerate(group)]):
            with graph.inserting_after(cast):
                item = graph.call_function(operator.getitem, (cast, index))
            for node, _ in readers[weight]:
                node.replace_input_with(weight, item)


def _cast_all(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    results = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(results, tensors)
    return results


def _make_fake_results(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]


def _set_up(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.dtype = inputs[0][0].dtype


def _differentiate(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], None]:
    present = [each for each in gradients if each is not None]
    results = iter(cast_all(present, ctx.dtype) if present else ())
    return [None if each is None else next(results) for each in gradients], None


cast_all = define_operator(
    "cast_all(Tensor[] tensors, ScalarType dtype) -> Tensor[]",
    cpu=_cast_all,
    fake=_make_fake_results,
    backward=_differentiate,
    setup_context=_set_up,
)
