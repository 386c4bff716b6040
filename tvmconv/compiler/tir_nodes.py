"""Search of TIR."""

from __future__ import annotations

import math
from typing import Any


def collect_nodes(node: Any, *kinds: type) -> list[Any]:
    """Return all nodes of some types in a statement or an expression, in the order of the text."""
    import tvm_ffi

    nodes: list[Any] = []
    tvm_ffi.structural_walk(node, (kinds, nodes.append), order="post")
    return nodes


def count_elements(buffer: Any) -> int:
    """Return the number of elements of a buffer of constant shape."""
    return math.prod(int(extent) for extent in buffer.shape)
