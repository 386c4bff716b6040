"""Layout of a lowered function's shared buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.arithmetic import round_up
from tvmconv.compiler.tir_nodes import collect_nodes, count_elements
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
    from tvm import tirx
    from tvm.ir import Call

    def list_buffers(kind: type) -> list[tuple[Any, np.dtype[Any]]]:
        buffers = [node.buffer for node in collect_nodes(function.body, kind)]
        shared_buffers = [buffer for buffer in buffers if str(buffer.scope()).startswith("shared")]
        return [(buffer, get_numpy_dtype(str(buffer.dtype))) for buffer in shared_buffers]

    offsets: dict[Any, int] = {}
    nbytes = 0
    element_sizes = [4]
    for buffer, dtype in list_buffers(tirx.AllocBuffer):
        offsets[buffer] = round_up(nbytes, SHARED_BASE_ADDRESS)
        nbytes = offsets[buffer] + count_elements(buffer) * dtype.itemsize
        element_sizes += [dtype.itemsize] if dtype != np.uint8 else []
    element_sizes += [dtype.itemsize for _, dtype in list_buffers(tirx.DeclBuffer)]
    element_sizes += [dispatch.smallest_access_bytes(call) for call in collect_nodes(function.body, Call)]
    unit_bytes = min(element_sizes)
    if unit_bytes < 2:
        raise AnalysisError("the emulator does not support accesses of single bytes to shared memory")
    return SharedMemoryLayout(offsets, nbytes, unit_bytes)
