"""Layout of a lowered function's shared buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.arithmetic import round_up
from tvmconv.emulator.addresses import SHARED_BASE_ADDRESS
from tvmconv.emulator.instructions import dispatch
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import get_numpy_dtype

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc


@dataclass(frozen=True)
class SharedMemoryLayout:
    """Layout of a function's shared buffers.

    Attributes:
        offsets: Offset of each allocated buffer in bytes.
        nbytes: Bytes of all buffers.
        unit_bytes: Bytes of the smallest element that is accessed.
    """

    offsets: Mapping[Any, int]
    nbytes: int
    unit_bytes: int


def plan_shared_memory(function: PrimFunc) -> SharedMemoryLayout:
    """Place the shared buffers of a function one after the other, each aligned to 1,024 bytes."""
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import Call

    offsets: dict[Any, int] = {}
    element_sizes = [4]
    next_offset = 0

    def note_allocation(node: Any) -> None:
        nonlocal next_offset
        if str(node.buffer.scope()).startswith("shared"):
            dtype = get_numpy_dtype(str(node.buffer.dtype))
            offsets[node.buffer] = next_offset
            buffer_ends.append(next_offset + math.prod(int(n) for n in node.buffer.shape) * dtype.itemsize)
            next_offset = round_up(buffer_ends[-1], SHARED_BASE_ADDRESS)
            if dtype != np.uint8:
                element_sizes.append(dtype.itemsize)

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
        raise AnalysisError("the emulator does not support accesses of single bytes to shared memory")
    return SharedMemoryLayout(offsets, buffer_ends[-1], unit_bytes)
