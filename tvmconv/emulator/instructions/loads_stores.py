"""Loads and stores between registers and memory, and the mapping of addresses between the blocks of a cluster.

Source: PTX ISA, "Data Movement and Conversion Instructions".
"""

from __future__ import annotations

import numpy as np

from tvmconv.emulator.addresses import CLUSTER_WINDOW_BYTES
from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions.operands import Instruction, executes
from tvmconv.emulator.memory.arrays import GlobalArray
from tvmconv.emulator.memory.shared_memory import MemoryAddress, SharedMemory
from tvmconv.emulator.state import Mask


@executes("ld", "ld_vec")
def _load(op: Instruction, mask: Mask) -> None:
    """Load: ld d..., address."""
    count, itemsize = op.call.vector_width
    nbytes, state, lanes = count * itemsize, op.state, op.state.find_lanes(mask)
    location = op.address(count, mask)
    element_bytes = location.memory.dtype.itemsize if isinstance(location.memory, GlobalArray) else itemsize

    def note_lanes(mask: Mask) -> None:
        selection = slice(None) if mask is None else mask[lanes]
        selected = MemoryAddress(location.memory, location.byte_offsets[selection], location.name)
        state.note_access(selected, "load", nbytes, lanes[selection], element_bytes)

    if not state.is_checked and isinstance(location.memory, SharedMemory) and location.target_blocks is None:
        return op.mark_written(count, mask, state.defer_access(note_lanes))
    loaded = state.load_bytes(location, nbytes, lanes, element_bytes)
    if state.is_checked:
        op.write(mask, loaded.view(f"u{itemsize}"))
    else:
        op.mark_written(count, mask)


@executes("st", "st_vec")
def _store(op: Instruction, mask: Mask) -> None:
    """Store: st address, a..."""
    count, itemsize = op.call.vector_width
    state, lanes, location = op.state, op.state.find_lanes(mask), op.address(0, mask)
    element_bytes = location.memory.dtype.itemsize if isinstance(location.memory, GlobalArray) else itemsize
    if not state.is_checked:
        op.evaluate(1, count, mask)
        return state.note_access(location, "store", count * itemsize, lanes, element_bytes)
    stored_bytes = np.ascontiguousarray(op.read(1, count, mask, itemsize).T).view(np.uint8)
    state.store_bytes(location, stored_bytes, lanes, element_bytes)


@executes("mapa_u32")
def _map_address(op: Instruction, mask: Mask) -> None:
    """Map a shared address to the same location in another block of the cluster: mapa d, a, rank."""
    own_addresses, cta_ranks = (op.values(index, mask).astype(np.int64) for index in (1, 2))
    cluster_size = op.state.threads.cluster_size
    if cta_ranks.size and not 0 <= int(cta_ranks.min()) <= int(cta_ranks.max()) < cluster_size:
        raise ExecutionError(f"{op}: rank {int(cta_ranks.max())} is outside the cluster of {cluster_size} blocks")
    peer_addresses = own_addresses % CLUSTER_WINDOW_BYTES + (cta_ranks + 1) * CLUSTER_WINDOW_BYTES
    op.write(mask, peer_addresses.astype(np.uint32)[:, None], depends_on_memory=False)
