"""Where the shared buffers of a lowered function lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.analysis.emulation.addresses import SHARED_BASE
from tvmconv.analysis.emulation.instructions import dispatch
from tvmconv.arithmetic import round_up
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import numpy_dtype

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc


@dataclass(frozen=True)
class Layout:
    """Where the shared buffers of a function lie.

    Attributes:
        offsets: of each buffer that is allocated, in bytes behind the first.
        nbytes: of all.
        unit: bytes of the smallest element that is accessed.
    """

    offsets: Mapping[Any, int]
    nbytes: int
    unit: int


def shared_layout(function: PrimFunc) -> Layout:
    """Where the shared buffers of a function lie, one behind the other; each begins at a multiple of 1,024 bytes."""
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import Call

    offsets: dict[Any, int] = {}
    sizes = [4]
    end = 0

    def allocate(node: Any) -> None:
        nonlocal end
        if str(node.buffer.scope()).startswith("shared"):
            offsets[node.buffer] = end
            nbytes = math.prod(int(n) for n in node.buffer.shape) * numpy_dtype(str(node.buffer.dtype)).itemsize
            end = round_up(end + nbytes, SHARED_BASE)
            layout_end.append(offsets[node.buffer] + nbytes)
            if str(node.buffer.dtype) != "uint8":
                sizes.append(numpy_dtype(str(node.buffer.dtype)).itemsize)

    layout_end = [0]
    tvm_ffi.structural_walk(function.body, (tirx.AllocBuffer, allocate), order="post")

    def declare(node: Any) -> None:
        if str(node.buffer.scope()).startswith("shared"):
            sizes.append(numpy_dtype(str(node.buffer.dtype)).itemsize)

    tvm_ffi.structural_walk(function.body, (tirx.DeclBuffer, declare), order="post")

    def call(node: Any) -> None:
        sizes.append(dispatch.smallest_access(node))

    tvm_ffi.structural_walk(function.body, (Call, call), order="post")
    unit = min(sizes)
    if unit < 2:
        raise AnalysisError("shared accesses of single bytes")
    return Layout(offsets, layout_end[-1], unit)
