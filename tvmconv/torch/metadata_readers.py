"""Nodes of a traced graph that read only the shape or dtype of a tensor, and assertions about these.

They do not keep a convolution's intermediate result from being fused, because the result of the fused operations has
the same shape and dtype.
"""

from __future__ import annotations

import torch
from torch import fx

METADATA_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "is_cuda", "layout")
METADATA_METHODS = ("size", "dim", "numel", "ndimension", "nelement", "is_floating_point")
METADATA_FUNCTIONS = ("numel", "is_tensor", "is_floating_point")
PURE_PACKAGES = ("_operator", "operator", "builtins", "math")


def is_metadata_reader(node: fx.Node) -> bool:
    """Return whether a node reads only the shape, dtype or device of its input."""
    if node.op == "call_method":
        return node.target in METADATA_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in METADATA_ATTRIBUTES
    return getattr(node.target, "__name__", "") in METADATA_FUNCTIONS


def remove_shape_assertions(graph: fx.Graph) -> None:
    """Remove calls of `torch._assert` whose conditions depend on shapes and dtypes only, and what only they read."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch._assert:
            continue
        inputs = node.all_input_nodes
        if all(_depends_on_metadata(each) for each in inputs):
            graph.erase_node(node)
            for each in inputs:
                _erase_unread(graph, each)
    for node in [
        each for each in reversed(graph.nodes) if is_metadata_reader(each)
    ]:  # texts of messages read some, too
        _erase_unread(graph, node)


def _depends_on_metadata(node: fx.Node) -> bool:
    """Return whether a value is computed from shapes and dtypes by Python's operators alone."""
    if is_metadata_reader(node):
        return True
    package = (getattr(node.target, "__module__", None) or "").partition(".")[0]
    is_pure = node.op == "call_function" and package in PURE_PACKAGES
    return is_pure and bool(node.all_input_nodes) and all(map(_depends_on_metadata, node.all_input_nodes))


def _erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node that is computed from metadata, and those before it, as far as nothing reads them."""
    if node.users or not _depends_on_metadata(node):
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for each in inputs:
        _erase_unread(graph, each)
