"""A copy of a model as graphs of `torch.fx`, and what the copy computes of the example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tvmconv.errors import translate_to_model_error
from tvmconv.torch.accuracy import compute_relative_error
from tvmconv.torch.conv_source import copy_model
from tvmconv.torch.model import Optimized
from tvmconv.torch.partition import GraphPartition, clone_tensors, partition_model, record_calls
from tvmconv.torch.qdq import normalize_graph
from tvmconv.torch.timing import use_cudnn_heuristics


@dataclass(frozen=True)
class TracedModel:
    """A copy of a model as graphs, and PyTorch's result for the example.

    Attributes:
        model: The copy.
        partitions: Its graphs; one of the whole model, or some of its parts.
        example: Arguments as the caller gave them.
        arguments: Copies of them, because a model may write to its arguments.
        expected: Values in PyTorch's result.
        is_quantized: Whether pairs of operators that quantize and dequantize are in the graph.
    """

    model: Optimized
    partitions: Sequence[GraphPartition]
    example: tuple[Any, ...]
    arguments: tuple[Any, ...]
    expected: list[Any]
    is_quantized: bool


def trace_model(
    model: torch.nn.Module, example: tuple[Any, ...], torch_device: torch.device, *, is_quantized: bool = False
) -> TracedModel:
    """Copy a model, run the copy on the example, and trace its graphs.

    `is_quantized`: whether pairs of operators that quantize and dequantize are to be kept as 8-bit convolutions.
    """
    with translate_to_model_error("the model cannot be copied"):  # for example a tensor with gradient history
        model_copy = copy_model(model).eval().requires_grad_(False)
        if isinstance(model_copy, torch.fx.GraphModule) and is_quantized:
            normalize_graph(model_copy)
    with record_calls(model_copy) as static_calls:
        expected = run_model(model_copy, example)
    optimized, partitions = partition_model(model_copy, static_calls, example)
    arguments = clone_tensors(example)
    optimized.set_example(arguments, torch_device)
    return TracedModel(optimized, partitions, example, arguments, expected, is_quantized)


def run_model(model: torch.nn.Module, arguments: Sequence[Any]) -> list[Any]:
    """Run a model and return the values in its result as a flat list; raise ModelError if it does not run."""
    with translate_to_model_error("the model does not run on the example"), use_cudnn_heuristics():
        return tree_leaves(model(*clone_tensors(arguments)))


def find_largest_difference(outputs: Sequence[Any], expected: Sequence[Any]) -> float | None:
    """Return the largest relative L2 difference of corresponding tensors; None if there are none."""
    differences = [
        compute_relative_error(output, expected_output)
        for output, expected_output in zip(outputs, expected, strict=False)
        if isinstance(output, torch.Tensor)
        and isinstance(expected_output, torch.Tensor)
        and expected_output.is_floating_point()
    ]
    return max(differences, default=None)
