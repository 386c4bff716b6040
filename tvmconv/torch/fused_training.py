"""Models for training as whole graphs, whose normalizations and element-wise operations are operators as well.

`fuse_model` compiles a trainable model in place with a backend of its own, as `torch.nn.Module.compile` does: class,
parameters and names stay. The backend replaces convolutions by those of the kernel table, and the operations around
them by the operators of `batch_norm_operators.py`, `row_operators.py` and `max_pool.py`. PyTorch runs all others one by
one. Each operation has its own launch, and operators in Python take longer on the host than PyTorch's. Such a model
is therefore meant for steps that are captured in a CUDA graph.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tvmconv.deadline import Deadline
from tvmconv.errors import DeviceError
from tvmconv.torch import batch_norm_operators, max_pool, row_operators
from tvmconv.torch.selection import ChooseMode
from tvmconv.torch.trainable import list_layers
from tvmconv.torch.training_backend import insert_operators

# Names of operations in a report, by the functions that compute them in a graph.
OPERATION_NAMES: dict[Any, str] = {
    batch_norm_operators.normalize_in_graph: "batch normalizations",
    batch_norm_operators.average_in_graph: "means of images",
    row_operators.layer_norm: "layer normalizations",
    row_operators.activate: "activations",
    row_operators.scale_add: "sums of residual blocks",
    row_operators.gate: "products with gates",
    max_pool.pool_in_graph: "maximum poolings",
}


# Names of PyTorch's functions that only make views, or that no kernel computes.
UNLISTED_NAMES = {"getitem", "permute", "view", "reshape", "flatten", "unflatten", "transpose", "squeeze", "unsqueeze"}
UNLISTED_NAMES |= {"expand", "detach", "chunk", "split", "getattr", "size", "movedim", "contiguous", "empty", "to"}


class FusedGraphBackend:
    """A backend of `torch.compile` for one model.

    Args:
        log: Path of a tuning log, from which kernels are taken; None for none.
        choose: What to choose kernels by, as `optimize` documents it.
    """

    def __init__(self, log: str | os.PathLike[str] | None, choose: ChooseMode) -> None:
        self._log, self._choose = log, choose
        self.deadline: Deadline | None = None  # of the selection of kernels
        self.is_selecting = True  # whether products that are not in the kernel table are compared with PyTorch's
        # Operations that operators compute, and those of PyTorch by the names of functions, in the graphs so far.
        self.counts: Counter[str] = Counter()
        self.other_counts: Counter[str] = Counter()

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
        """Return a graph with operators in place of what they can compute."""
        options: dict[str, Any] = {"log": self._log, "choose": self._choose, "deadline": self.deadline}
        options |= {"is_eager": True, "is_selecting": self.is_selecting, "skips_compared": True}
        try:
            graph = insert_operators(gm, inputs, **options)
        except DeviceError:  # tvmconv has no device for PyTorch's
            return gm
        if self.is_selecting:
            self._count(graph.graph)
        return graph

    def _count(self, graph: fx.Graph) -> None:
        """Count the operations of a graph."""
        for node in graph.nodes:
            if node.target in OPERATION_NAMES:
                self.counts[OPERATION_NAMES[node.target]] += 1
            elif node.op in ("call_function", "call_method") and not _is_own(node.target):
                name = getattr(node.target, "__name__", str(node.target)).strip("_")
                self.other_counts.update([name] if name not in UNLISTED_NAMES else [])

    def describe(self) -> str:
        """Return sentences with the number of operations that operators compute, and of those that PyTorch computes."""
        operators = ", ".join(f"{count} {name}" for name, count in self.counts.most_common())
        text = f"The model runs as a graph, in which operators compute {operators or 'convolutions alone'}."
        if others := ", ".join(f"{count} {name}" for name, count in self.other_counts.most_common()):
            text += f" PyTorch's functions there: {others}."
        return text


def _is_own(target: Any) -> bool:
    """Return whether a function or operator is one of this package."""
    return str(getattr(target, "__module__", "")).startswith("tvmconv") or str(target).startswith("tvmconv.")


def fuse_model(model: torch.nn.Module, backend: FusedGraphBackend) -> None:
    """Have a trainable model run as graphs that the backend compiles, one for each set of shapes and dtypes."""
    for layer in list_layers(model).values():
        layer.is_fused = True

    # PyTorch captures no frames of its own modules, such as `torch.nn.Sequential`, so that this one comes first.
    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    model._compiled_call_impl = torch.compile(call, backend=backend, dynamic=False)


def separate_model(model: torch.nn.Module) -> None:
    """Undo `fuse_model`."""
    for layer in list_layers(model).values():
        layer.is_fused = False
    model._compiled_call_impl = None
