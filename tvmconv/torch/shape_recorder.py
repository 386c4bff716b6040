"""A run of a traced graph that records shapes, strides and dtypes of all results, and which share memory."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from tvmconv.torch.conv_site import TensorMetadata


class ShapeRecorder(fx.Interpreter):
    """An interpreter that runs a graph and records the metadata of its nodes.

    Args:
        graph: The traced graph.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.metadata: dict[fx.Node, TensorMetadata] = {}
        self._memory_ids: dict[fx.Node, dict[int, int]] = {}  # number of the memory by address, of each result
        self._numbers = itertools.count(1)

    def run_with_arguments(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on positional and keyword arguments."""
        arguments = inspect.signature(self.module.forward).bind(*args, **kwargs)
        arguments.apply_defaults()
        return self.run(*arguments.args)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and record the metadata of its result."""
        result = super().run_node(n)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self._memory_ids[n] = {address: self._number_memory(n, address) for address in map(find_storage, tensors)}
        if isinstance(result, torch.Tensor):
            self.metadata[n] = TensorMetadata.from_tensor(result, self._memory_ids[n][find_storage(result)])
        return result

    def _number_memory(self, n: fx.Node, address: int) -> int:
        """Return the number of a result's memory: that of an input with the same memory, or a new one.

        Inputs of the graph are known by their address, because they live as long as the run.
        """
        if n.op in ("placeholder", "get_attr"):
            return -address
        numbers = (self._memory_ids.get(each, {}).get(address) for each in n.all_input_nodes)
        return next((number for number in numbers if number is not None), None) or next(self._numbers)


def find_storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 for a tensor without one of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a sparse tensor, for example
        return 0
