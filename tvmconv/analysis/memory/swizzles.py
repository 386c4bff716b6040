"""Swizzles of the shared-memory tiles that TMA and wgmma access, and whether both agree on them.

TMA and wgmma move chunks of 16 bytes, and wgmma reads 8 rows of chunks together (a core matrix). Rows that lie 32, 64
or 128 bytes apart would fall into the same banks, and the swizzle of that width spreads them. Source: PTX ISA,
"Swizzling modes" of tensors, and "Shared Memory Matrix Layouts" of wgmma. The hardware's way to serve them is not
documented. The counted wavefronts are those that the banks would take for 8 chunks at a time, as for `ldmatrix`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.tir.accesses import select_middle_block
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.emulator.execution import run_with_observer
from tvmconv.emulator.observers import AccessObserver, MemoryAccess, StopEmulationError
from tvmconv.emulator.threads import CHUNK_BYTES, SHARED_BASE_ADDRESS, count_lanes, expand_to_clusters
from tvmconv.kernel import Kernel
from tvmconv.target import BANK_BYTES, NUM_BANKS, WARPGROUP_SIZE

CORE_MATRIX_ROWS = 8
MAX_SITE_SAMPLES = 64  # accesses of one site to inspect, more than the number of stages of any pipeline


@dataclass
class SwizzledSmemTile:
    """Shared memory that TMA copies an array to or from."""

    array: str  # name of the array
    kind: str  # "load" or "store" of the array
    tma_swizzle: int  # swizzle width of TMA in bytes; 0 without a swizzle
    # swizzle widths with which wgmma reads the tile; empty if wgmma does not read it
    wgmma_swizzles: set[int] = field(default_factory=set)
    num_core_matrices: int = 0  # inspected core matrices
    num_wavefronts: int = 0  # wavefronts that they take

    @property
    def is_consistent(self) -> bool:
        """Whether wgmma reads the tile with the swizzle with which TMA writes it."""
        return self.wgmma_swizzles <= {self.tma_swizzle}


def inspect_tiles(kernel: Kernel, lowered_kernel: LoweredKernel) -> list[SwizzledSmemTile]:
    """Return the tiles that TMA copies in one block of a device kernel, loads first.

    The block is executed until `MAX_SITE_SAMPLES` accesses of each site in its loops have been inspected.
    """
    if not lowered_kernel.tensor_maps:
        return []
    observer = SwizzleObserver(count_lanes(lowered_kernel))
    with contextlib.suppress(StopEmulationError):
        blocks = expand_to_clusters(lowered_kernel.launch, [select_middle_block(lowered_kernel)])
        run_with_observer(lowered_kernel, kernel.memory_scopes, blocks, observer)
    observed_tiles = observer.list_tiles()
    output_index = len(kernel.executable.arrays) - 1  # the output is stored after the loops, perhaps never reached
    stored_tiles = {
        (name, "store", parameter.tensor_map.swizzle)
        for parameter in lowered_kernel.parameters
        if parameter.tensor_map and parameter.index == output_index
        for name in [list(kernel.memory_scopes)[output_index]]
    }
    return observed_tiles + [
        SwizzledSmemTile(*key)
        for key in sorted(stored_tiles - {(tile.array, tile.kind, tile.tma_swizzle) for tile in observed_tiles})
    ]


class SwizzleObserver(AccessObserver):
    """Observer that inspects the first shared-memory accesses of TMA and wgmma in the first executed block."""

    wants_async_proxy = immediate = True

    def __init__(self, lanes_per_block: int) -> None:
        self._lanes_per_block = lanes_per_block
        self._num_samples: Counter[int] = Counter()
        self._current_site = 0
        self._store_sites: set[int] = set()  # output stores after the loops, which take many steps to reach
        self._tiles: dict[tuple[str, str, int], SwizzledSmemTile] = {}
        self._tile_by_chunk: dict[int, SwizzledSmemTile] = {}
        self._has_wgmma_read = False

    def wants_site(self, site: int) -> bool:
        """Select the first `MAX_SITE_SAMPLES` accesses of each site."""
        self._num_samples[site] += 1
        self._current_site = site
        has_samples = (
            count >= MAX_SITE_SAMPLES or key in self._store_sites for key, count in self._num_samples.items()
        )
        if self._num_samples[site] > MAX_SITE_SAMPLES and self._has_wgmma_read and all(has_samples):
            raise StopEmulationError
        return self._num_samples[site] <= MAX_SITE_SAMPLES

    def on_async_proxy_access(self, event: MemoryAccess) -> None:
        """Inspect one access."""
        block_event = event.restrict_to_first_block(self._lanes_per_block)
        if block_event is None or block_event.space != "shared":
            return
        if block_event.global_array:
            kind = "load" if block_event.kind == "store" else "store"
            key = block_event.global_array, kind, block_event.swizzle_bytes
            tile = self._tiles.setdefault(key, SwizzledSmemTile(*key))
            if kind == "store":
                self._store_sites.add(self._current_site)
            else:
                self._tile_by_chunk.update(dict.fromkeys(_find_chunks(block_event.addresses), tile))
            return
        addresses = block_event.addresses[block_event.lanes // WARPGROUP_SIZE == block_event.lanes[0] // WARPGROUP_SIZE]
        read_tile = self._tile_by_chunk.get(_find_chunks(addresses[:1])[0])
        if read_tile:
            self._has_wgmma_read = True
            read_tile.wgmma_swizzles.add(block_event.swizzle_bytes)
            wavefronts = count_core_wavefronts(addresses.reshape(-1, 2))
            read_tile.num_core_matrices += len(wavefronts)
            read_tile.num_wavefronts += int(wavefronts.sum())

    def list_tiles(self) -> list[SwizzledSmemTile]:
        """Return the inspected tiles, loads first."""
        return sorted(self._tiles.values(), key=lambda tile: (tile.kind, tile.array, tile.tma_swizzle))


def _find_chunks(addresses: NDArray[np.int64]) -> list[int]:
    return ((addresses - SHARED_BASE_ADDRESS) // CHUNK_BYTES).tolist()


def count_core_wavefronts(row_addresses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the wavefronts of each core matrix of an operand; 1 if its chunks lie in different banks."""
    by_matrix = row_addresses.reshape(-1, CORE_MATRIX_ROWS, row_addresses.shape[1]).transpose(0, 2, 1)
    matrices = by_matrix.reshape(-1, CORE_MATRIX_ROWS)
    num_bank_groups = NUM_BANKS * BANK_BYTES // CHUNK_BYTES
    is_bank_group = (matrices // CHUNK_BYTES % num_bank_groups)[:, :, None] == np.arange(num_bank_groups)
    return is_bank_group.sum(axis=1).max(axis=1)
