"""What of the arrays a block touches, and how many bytes that makes from the device's memory.

A block's footprint of an array is the set of its sectors that the block touches, each once however often it does. From
memory comes each array once, as long as what is touched between two reads of it fits the L2 cache. Where it does not,
an array that does not depend on an axis of the grid is read again for each step along this axis; blocks begin in the
order of x, then y, then z. That is reuse by stack distance (R. Mattson et al., "Evaluation techniques for storage
hierarchies", 1970) with blocks in place of accesses.

Kernels of instructions by name, and of TMA, have their addresses in registers: of them each array counts once; and so
it does where a thread has more iterations than can be looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.memory.coalescing import GLOBAL, SECTOR_BYTES
from tvmconv.analysis.tir.accesses import Access, iterate_accesses
from tvmconv.analysis.tir.scopes import execute_scope, has_instructions
from tvmconv.arithmetic import ceil_div
from tvmconv.emulator.blocks import BlockIndex
from tvmconv.errors import AnalysisError
from tvmconv.gpu_specs import get_l2_bytes

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.kernel import Kernel


ACCESS_KINDS = ("load", "store")


@dataclass
class ArrayFootprint:
    """What a block touches of an array, in one way.

    Attributes:
        array_bytes: of the whole array.
        is_touched: which of its sectors the middle block of the grid touches.
        depends_on_axis: along which axes of the grid another block touches others.
    """

    array_bytes: int
    is_touched: NDArray[np.bool_]
    depends_on_axis: list[bool] = field(default_factory=lambda: [False] * 3)

    @property
    def num_sectors(self) -> int:
        """Sectors that the block touches."""
        return int(self.is_touched.sum())


ArrayFootprints = dict[tuple[str, str], ArrayFootprint]  # by kind of access and array


_FOOTPRINT_CACHE: WeakKeyDictionary[Kernel, dict[str, ArrayFootprints | None]] = WeakKeyDictionary()  # steps by name


def compute_footprints(kernel: Kernel, lowered_kernel: LoweredKernel) -> ArrayFootprints | None:
    """What the middle block of a grid touches; None where the text alone does not tell."""
    footprints_by_kernel = _FOOTPRINT_CACHE.setdefault(kernel, {})
    if lowered_kernel.name not in footprints_by_kernel:
        try:
            footprints_by_kernel[lowered_kernel.name] = (
                None if has_instructions(lowered_kernel.function) else _compute_by_evaluation(kernel, lowered_kernel)
            )
        except AnalysisError:
            footprints_by_kernel[lowered_kernel.name] = None
    return footprints_by_kernel[lowered_kernel.name]


def _compute_by_evaluation(kernel: Kernel, lowered_kernel: LoweredKernel) -> ArrayFootprints:
    def is_global(buffer: Any) -> bool:
        return str(buffer.scope()) == GLOBAL and kernel.memory_scopes.get(str(buffer.name), GLOBAL) == GLOBAL

    global_loads_and_stores = list(iterate_accesses(lowered_kernel.function, is_global))
    middle_block = tuple(extent // 2 for extent in lowered_kernel.launch.grid)
    array_footprints = _collect_touched(global_loads_and_stores, lowered_kernel, middle_block)  # type: ignore[arg-type]
    for axis, extent in enumerate(lowered_kernel.launch.grid):
        if extent > 1:
            neighbor_block = tuple(
                coordinate - 1 if axis == grid_axis else coordinate for grid_axis, coordinate in enumerate(middle_block)
            )
            neighbor_footprints = _collect_touched(global_loads_and_stores, lowered_kernel, neighbor_block)  # type: ignore[arg-type]
            for key, footprint in array_footprints.items():
                footprint.depends_on_axis[axis] = not np.array_equal(
                    footprint.is_touched, neighbor_footprints[key].is_touched
                )
    return array_footprints


def count_dram_bytes(kernel: Kernel) -> int:
    """Bytes from and to the device's memory, of the timed steps of a kernel that finds none of its arrays in L2."""
    l2_capacity_bytes = get_l2_bytes(str(kernel.device.arch))
    return sum(
        count_kernel_dram_bytes(kernel, lowered_kernel, compute_footprints(kernel, lowered_kernel), l2_capacity_bytes)
        for lowered_kernel in kernel.timed_kernels
    )


def count_kernel_dram_bytes(
    kernel: Kernel, lowered_kernel: LoweredKernel, footprints: ArrayFootprints | None, l2_capacity_bytes: int
) -> int:
    """Bytes from and to the device's memory of one step; see `count_dram_bytes`."""
    if footprints is None:
        return kernel.workload.min_bytes if lowered_kernel is kernel.timed_kernels[0] else 0
    return sum(count_moved_bytes(lowered_kernel, footprints, l2_capacity_bytes).values())


def count_moved_bytes(
    lowered_kernel: LoweredKernel, footprints: ArrayFootprints, l2_capacity_bytes: int
) -> dict[str, int]:
    """Bytes from the device's memory, as `load`, and to it, as `store`, of one step, by what a block touches."""
    bytes_per_sweep = {key: float(footprint.num_sectors * SECTOR_BYTES) for key, footprint in footprints.items()}
    num_sweeps = dict.fromkeys(footprints, 1)
    for axis, extent in enumerate(lowered_kernel.launch.grid):
        fits_in_l2 = sum(bytes_per_sweep.values()) <= l2_capacity_bytes
        for key, footprint in footprints.items():
            if footprint.depends_on_axis[axis]:
                bytes_per_sweep[key] = min(footprint.array_bytes, bytes_per_sweep[key] * extent)
            elif not fits_in_l2:
                num_sweeps[key] *= extent
    return {
        kind: round(sum(num_sweeps[key] * bytes_per_sweep[key] for key in footprints if key[0] == kind))
        for kind in ACCESS_KINDS
    }


def _collect_touched(block_accesses: list[Access], lowered_kernel: LoweredKernel, block: BlockIndex) -> ArrayFootprints:
    footprints: ArrayFootprints = {}
    for access in block_accesses:
        key = access.kind, str(access.buffer.name)
        if key not in footprints:
            nbytes = math.prod(int(extent) for extent in access.buffer.shape) * access.itemsize
            footprints[key] = ArrayFootprint(nbytes, np.zeros(ceil_div(nbytes, SECTOR_BYTES) + 1, bool))
        for execution in execute_scope(access.scope, [access.index], lowered_kernel.launch, block):
            first_bytes = execution.values[0][execution.is_active] * access.itemsize
            for byte_offset in range(0, access.nbytes, SECTOR_BYTES):
                footprints[key].is_touched[(first_bytes + byte_offset) // SECTOR_BYTES] = True
            footprints[key].is_touched[(first_bytes + access.nbytes - 1) // SECTOR_BYTES] = True
    return footprints
