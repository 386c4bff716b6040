"""Where the shared buffers of a lowered function lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.arithmetic import round_up
from tvmconv.emulator.addresses import SHARED_BASE_ADDRESS
from tvmconv.emulator.instructions import dispatch
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import get_numpy_dtype

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc


@dataclass(frozen=True)
class SharedMemoryLayout:
    """Where the shared buffers of a function lie.

    Attributes:
        offsets: of each buffer that is allocated, in bytes behind the first.
        nbytes: of all.
        unit_bytes: bytes of the smallest element that is accessed.
    """

    offsets: Mapping[Any, int]
    nbytes: int
    unit_bytes: int


def plan_shared_memory(function: PrimFunc) -> SharedMemoryLayout:
    """Where the shared buffers of a function lie, one behind the other; each begins at a multiple of 1,024 bytes."""
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import Call

    offsets: dict[Any, int] = {}
    element_sizes = [4]
    next_offset = 0

    def note_allocation(node: Any) -> None:
        nonlocal next_offset
        if str(node.buffer.scope()).startswith("shared"):
            offsets[node.buffer] = next_offset
            nbytes = math.prod(int(n) for n in node.buffer.shape) * get_numpy_dtype(str(node.buffer.dtype)).itemsize
            next_offset = round_up(next_offset + nbytes, SHARED_BASE_ADDRESS)
            buffer_ends.append(offsets[node.buffer] + nbytes)
            if str(node.buffer.dtype) != "uint8":
                element_sizes.append(get_numpy_dtype(str(node.buffer.dtype)).itemsize)

    buffer_ends = [0]
    tvm_ffi.structural_walk(function.body, (tirx.AllocBuffer, note_allocation), order="post")

    def note_declaration(node: Any) -> None:
        if str(node.buffer.scope()).startswith("shared"):
            element_sizes.append(get_numpy_dtype(str(node.buffer.dtype)).itemsize)

    tvm_ffi.structural_walk(function.body, (tirx.DeclBuffer, note_declaration), order="post")

    def note_call(node: Any) -> None:
        element_sizes.append(dispatch.smallest_access_bytes(node))

    tvm_ffi.structural_walk(function.body, (Call, note_call), order="post")
    unit_bytes = min(element_sizes)
    if unit_bytes < 2:
        raise AnalysisError("shared accesses of single bytes")
    return SharedMemoryLayout(offsets, buffer_ends[-1], unit_bytes)
