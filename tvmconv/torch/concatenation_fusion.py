"""The concatenations of images in traced graphs that a kernel computes, where it is faster than PyTorch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from tvmconv.torch.concatenation import MAX_INPUTS, concatenate, find_common_layout
from tvmconv.torch.conv_call import KERNEL_DTYPES
from tvmconv.torch.conv_site import TensorMetadata
from tvmconv.torch.tensor_layout import find_layout, lay_out
from tvmconv.workloads.layout import UNIFORM_LAYOUTS

FUNCTIONS = (torch.cat, torch.concat, torch.concatenate)
MAX_RATIO = 1.1  # largest time in the layout of the run, relative to PyTorch's: the plan may choose the other layout


class ConcatenationReplacer:
    """What replaces concatenations of images in graphs by the operator, where this is faster.

    Args:
        time_call: Function that measures calls; None to replace all of them.
        has_time: Function that returns whether there is time for further measurements; without time, all are replaced.
    """

    def __init__(
        self, time_call: Callable[[str, Callable[[], object]], float] | None, has_time: Callable[[], bool]
    ) -> None:
        self._time_call, self._has_time = time_call, has_time
        self._is_faster: dict[str, bool] = {}

    def replace(self, graph: fx.GraphModule, metadata: Mapping[fx.Node, TensorMetadata]) -> int:
        """Replace the concatenations of a graph, given the metadata of its nodes in a run; return their number."""
        num_replaced = 0
        for node in list(graph.graph.nodes):
            sources = _match_concatenation(node, metadata)
            inputs = [metadata[each] for each in sources]
            if not inputs or not self._decide(inputs):
                continue
            with graph.graph.inserting_before(node):
                call = graph.graph.call_function(concatenate, (sources,))
            node.replace_all_uses_with(call)
            graph.graph.erase_node(node)
            metadata = {**metadata, call: metadata[node]}
            num_replaced += 1
        return num_replaced

    def _decide(self, inputs: Sequence[TensorMetadata]) -> bool:
        """Return whether the kernel is faster than PyTorch in one layout, and not slower in that of the run."""
        key = str(inputs)
        if key not in self._is_faster:
            if self._time_call is None or not self._has_time():
                return True
            self._is_faster[key] = self._compare([each.make_random_like() for each in inputs], key)
        return self._is_faster[key]

    def _compare(self, images: Sequence[torch.Tensor], key: str) -> bool:
        assert self._time_call
        own_layout, ratios = find_common_layout(images), dict[str, float]()
        for layout in UNIFORM_LAYOUTS:
            inputs = [*images] if layout == own_layout else [lay_out(x, layout) for x in images]
            names = (f"{layout}: {name} {key}" for name in ("PyTorch, concatenation", "concatenation"))
            pytorch_seconds = self._time_call(next(names), functools.partial(torch.cat, inputs, 1))
            ratios[layout] = self._time_call(next(names), functools.partial(concatenate, inputs)) / pytorch_seconds
        return min(ratios.values()) < 1 and ratios.get(own_layout or "", 0.0) < MAX_RATIO


def _match_concatenation(node: fx.Node, metadata: Mapping[fx.Node, TensorMetadata]) -> list[fx.Node]:
    """Return the images that a node joins along their channels; an empty list for another node."""
    if node.op != "call_function" or node.target not in FUNCTIONS or not node.args or "out" in node.kwargs:
        return []
    sources = node.args[0]
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
    if not isinstance(sources, (list, tuple)) or not 1 < len(sources) <= MAX_INPUTS or not isinstance(axis, int):
        return []
    inputs = [metadata[each] for each in sources if isinstance(each, fx.Node) and each in metadata]
    dtypes, ndims = {each.dtype for each in inputs}, {len(each.shape) for each in inputs}
    if len(inputs) < len(sources) or len(dtypes) > 1 or len(ndims) > 1 or node not in metadata:
        return []
    (dtype,), (ndim,) = dtypes, ndims
    if dtype not in KERNEL_DTYPES or ndim < 3 or axis % ndim != 1 or not all(map(math.prod, (x.shape for x in inputs))):
        return []
    result = metadata[node]
    layout = find_common_layout(inputs)
    keeps_layout = layout is None or find_layout(result.shape, result.stride) in (None, layout)
    return [*sources] if keeps_layout else []
