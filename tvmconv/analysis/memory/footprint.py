"""Footprints of a block in the arrays, and the DRAM bytes that follow from them.

The footprint of a block in an array is the set of the array's sectors that the block touches. An array is read from
DRAM once if everything that is touched between two reads of it fits the L2 cache. Otherwise, an array that does not
depend on an axis of the grid is read again for each step along this axis; blocks start in the order of x, y, z. This is
reuse by stack distance (R. Mattson et al., "Evaluation techniques for storage hierarchies", 1970) with blocks in place
of accesses.

Each array counts once if the kernel uses GPU instructions by name or TMA, because their addresses lie in registers, and
if a thread has too many iterations to evaluate.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.tir.accesses import Access, is_global, iterate_accesses, select_middle_block
from tvmconv.analysis.tir.scopes import execute_scope, needs_execution
from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.emulator.threads import BlockIndex
from tvmconv.errors import AnalysisError
from tvmconv.kernel import Kernel
from tvmconv.target import SECTOR_BYTES, find_architecture

ACCESS_KINDS = ("load", "store")


@dataclass
class ArrayFootprint:
    """Part of an array that a block loads or stores."""

    array_bytes: int  # bytes of the whole array
    is_touched: NDArray[np.bool_]  # whether the middle block of the grid touches each sector of the array
    # whether the touched sectors change along each axis (x, y, z) of the grid
    depends_on_axis: list[bool] = field(default_factory=lambda: [False] * 3)

    @property
    def num_sectors(self) -> int:
        """Number of sectors that the block touches."""
        return int(self.is_touched.sum())


ArrayFootprints = dict[tuple[str, str], ArrayFootprint]  # by kind of access and name of the array
# Footprints by the name of the device kernel.
_FOOTPRINT_CACHE: WeakKeyDictionary[Kernel, dict[str, ArrayFootprints | None]] = WeakKeyDictionary()


def compute_footprints(kernel: Kernel, lowered_kernel: LoweredKernel) -> ArrayFootprints | None:
    """Return the footprints of the middle block of a grid; None if the TIR alone does not determine them."""
    cache = _FOOTPRINT_CACHE.setdefault(kernel, {})
    if lowered_kernel.name not in cache:
        cache[lowered_kernel.name] = None
        if not needs_execution(lowered_kernel.function):
            with suppress(AnalysisError):
                cache[lowered_kernel.name] = _compute_by_evaluation(kernel, lowered_kernel)
    return cache[lowered_kernel.name]


def _compute_by_evaluation(kernel: Kernel, lowered_kernel: LoweredKernel) -> ArrayFootprints:
    accesses = list(iterate_accesses(lowered_kernel.function, lambda buffer: is_global(kernel, buffer)))
    middle_block = select_middle_block(lowered_kernel)
    footprints = _collect_touched(accesses, lowered_kernel, middle_block)
    for axis, extent in enumerate(lowered_kernel.launch.grid):
        if extent > 1:
            x, y, z = (coordinate - (axis == other) for other, coordinate in enumerate(middle_block))
            neighbors = _collect_touched(accesses, lowered_kernel, (x, y, z))
            for key, footprint in footprints.items():
                footprint.depends_on_axis[axis] = not np.array_equal(footprint.is_touched, neighbors[key].is_touched)
    return footprints


def count_dram_bytes(kernel: Kernel) -> int:
    """Return the DRAM bytes that the timed device kernels move if no array is in L2 at the start."""
    l2_capacity_bytes = find_architecture(str(kernel.device.arch)).l2_bytes
    return sum(
        count_kernel_dram_bytes(kernel, lowered_kernel, compute_footprints(kernel, lowered_kernel), l2_capacity_bytes)
        for lowered_kernel in kernel.timed_kernels
    )


def count_kernel_dram_bytes(
    kernel: Kernel, lowered_kernel: LoweredKernel, footprints: ArrayFootprints | None, l2_capacity_bytes: int
) -> int:
    """Return the DRAM bytes that one device kernel moves; see `count_dram_bytes`."""
    if footprints is None:
        return kernel.workload.min_bytes if lowered_kernel is kernel.timed_kernels[0] else 0
    return sum(count_moved_bytes(lowered_kernel, footprints, l2_capacity_bytes).values())


def count_moved_bytes(
    lowered_kernel: LoweredKernel, footprints: ArrayFootprints, l2_capacity_bytes: int
) -> dict[str, int]:
    """Return the DRAM bytes that a device kernel moves by the footprints, for each of `ACCESS_KINDS`."""
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


def _collect_touched(accesses: list[Access], lowered_kernel: LoweredKernel, block: BlockIndex) -> ArrayFootprints:
    footprints: ArrayFootprints = {}
    for access in accesses:
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
