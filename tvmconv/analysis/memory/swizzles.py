"""How tiles lie in shared memory that TMA and wgmma access: which swizzle each has, and whether both agree on it.

TMA and wgmma move chunks of 16 bytes, 8 rows of which wgmma reads together (a core matrix). Of rows that lie 32, 64 or
128 bytes apart these would be in the same banks; the swizzle of that many bytes spreads them. Source: PTX ISA,
"Swizzling modes" of tensors, and "Shared Memory Matrix Layouts" of wgmma. How the hardware serves them is not
documented: counted are the wavefronts that the banks would take for 8 chunks at a time, as `ldmatrix` does.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.memory.coalescing import select_middle_block
from tvmconv.emulator.addresses import CHUNK_BYTES, SHARED_BASE_ADDRESS
from tvmconv.emulator.blocks import count_lanes, expand_to_clusters
from tvmconv.emulator.observation import run_with_observer
from tvmconv.emulator.observers import AccessObserver, MemoryAccess, StopEmulationError
from tvmconv.gpu_specs import BANK_BYTES, NUM_BANKS, WARPGROUP_SIZE

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.kernel import Kernel

CORE_MATRIX_ROWS = 8  # of a core matrix
MAX_SITE_SAMPLES = 64  # accesses of one place that are looked at: more than any pipeline has stages


@dataclass
class SwizzledSmemTile:
    """Shared memory that TMA copies an array to, or from.

    Attributes:
        array: its name.
        kind: load or store, of the array.
        tma_swizzle: of TMA, in bytes; 0 for none.
        wgmma_swizzles: the swizzles that wgmma takes it to have; none where it does not read it.
        num_core_matrices: core matrices that were looked at.
        num_wavefronts: that they take.
    """

    array: str
    kind: str
    tma_swizzle: int
    wgmma_swizzles: set[int] = field(default_factory=set)
    num_core_matrices: int = 0
    num_wavefronts: int = 0

    @property
    def is_consistent(self) -> bool:
        """Whether what reads it takes it to lie as it does."""
        return self.wgmma_swizzles <= {self.tma_swizzle}


def inspect_tiles(kernel: Kernel, lowered_kernel: LoweredKernel) -> list[SwizzledSmemTile]:
    """The tiles that TMA copies in one block of a step, loads first; none where it copies none.

    The block is executed until each access in its loops has been looked at often enough.

    Raises:
        AnalysisError: the step does what cannot be executed.
    """
    if not lowered_kernel.tensor_maps:
        return []
    observer = SwizzleObserver(count_lanes(lowered_kernel))
    with contextlib.suppress(StopEmulationError):
        run_with_observer(
            lowered_kernel,
            kernel.memory_scopes,
            expand_to_clusters(lowered_kernel.launch, [select_middle_block(lowered_kernel)]),
            observer,
        )
    observed_tiles = observer.list_tiles()
    output_index = len(kernel.executable.arrays) - 1  # is stored behind the loops
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
    """Looks at the first accesses of TMA and wgmma to the shared memory of the first block that is executed.

    Args:
        lanes_per_block: of a block.
    """

    wants_async_proxy = immediate = True

    def __init__(self, lanes_per_block: int) -> None:
        self._lanes_per_block = lanes_per_block
        self._num_samples: Counter[int] = Counter()
        self._current_site = 0
        self._store_sites: set[int] = (
            set()
        )  # where outputs are stored, behind the loops: that takes many steps to come by
        self._tiles: dict[tuple[str, str, int], SwizzledSmemTile] = {}
        self._tile_by_chunk: dict[int, SwizzledSmemTile] = {}
        self._has_wgmma_read = False

    def wants_site(self, site: int) -> bool:
        """The first ones of each place."""
        self._num_samples[site] += 1
        self._current_site = site
        enough_samples = (
            num_samples >= MAX_SITE_SAMPLES
            for sampled_site, num_samples in self._num_samples.items()
            if sampled_site not in self._store_sites
        )
        if self._num_samples[site] > MAX_SITE_SAMPLES and self._has_wgmma_read and all(enough_samples):
            raise StopEmulationError
        return self._num_samples[site] <= MAX_SITE_SAMPLES

    def on_async_proxy_access(self, event: MemoryAccess) -> None:
        """Look at one."""
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
        """What was found, loads first."""
        return sorted(self._tiles.values(), key=lambda tile: (tile.kind, tile.array, tile.tma_swizzle))


def _find_chunks(addresses: NDArray[np.int64]) -> list[int]:
    return ((addresses - SHARED_BASE_ADDRESS) // CHUNK_BYTES).tolist()


def count_core_wavefronts(row_addresses: NDArray[np.int64]) -> NDArray[np.int64]:
    """The wavefronts of each core matrix of an operand, 1 where its chunks lie in different banks.

    Args:
        row_addresses: addresses in bytes of the chunks of each row, of shape (rows, chunks); whole core matrices.
    """
    matrices = (
        row_addresses.reshape(-1, CORE_MATRIX_ROWS, row_addresses.shape[1])
        .transpose(0, 2, 1)
        .reshape(-1, CORE_MATRIX_ROWS)
    )
    num_bank_groups = NUM_BANKS * BANK_BYTES // CHUNK_BYTES
    is_bank_group = (matrices // CHUNK_BYTES % num_bank_groups)[:, :, None] == np.arange(num_bank_groups)
    return is_bank_group.sum(axis=1).max(axis=1)
