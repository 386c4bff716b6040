"""Bulk copies of contiguous bytes between global and shared memory, without a tensor map.

Like a copy by TMA, one to shared memory completes as late as possible, when no thread can continue without it. Source:
PTX ISA, "cp.async.bulk".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions.operands import Instruction, translates
from tvmconv.emulator.memory.arrays import GlobalArray
from tvmconv.emulator.memory.shared_memory import MemoryAddress
from tvmconv.emulator.observers import AccessKind, MemoryAccess
from tvmconv.emulator.state import Mask, StatementCode
from tvmconv.emulator.threads import CHUNK_BYTES, Lanes


class _BulkCopy:
    """A copy of as many bytes in each lane, whose operands are the addresses in shared and global memory."""

    def __init__(self, op: Instruction, mask: Mask, shared_operand: int, global_operand: int) -> None:
        self._op, self._state, self.lanes = op, op.state, op.state.find_lanes(mask)
        self.nbytes = op.uniform_value(2, mask)
        location, array_location = (
            op.address(shared_operand, mask, "shared"),
            op.address(global_operand, mask, "global"),
        )
        assert isinstance(array_location.memory, GlobalArray)
        self.array, self._offsets, self._name = array_location.memory, array_location.byte_offsets, location.name
        for name, values in {"bytes": np.array(self.nbytes), "global memory": self._offsets}.items():
            if (values % CHUNK_BYTES).any():
                raise ExecutionError(f"misaligned: {op}: {name}: {values} is not a multiple of {CHUNK_BYTES}")
        self.array.check_access(self._offsets, self.nbytes)
        self._addresses = location.byte_offsets[:, None] + np.arange(0, self.nbytes, CHUNK_BYTES)
        self.chunks = op.state.shared.find_chunks(self._addresses, self.blocks)

    @property
    def blocks(self) -> Lanes:
        """Block of each lane."""
        return self.lanes // self._state.threads.lanes_per_block

    def read_array(self) -> NDArray[np.uint8]:
        """Return the data of the array, of shape (copies, chunks, 16)."""
        return self.array.read(self._offsets, self.nbytes).reshape(len(self.lanes), -1, CHUNK_BYTES)

    def write_array(self, data: NDArray[np.uint8]) -> None:
        """Write data of the shape (copies, chunks, 16) to the array."""
        self.array.write(self._offsets, np.ascontiguousarray(data).reshape(len(self.lanes), -1))

    def notify(self, kind: AccessKind) -> None:
        """Notify the observer of what is accessed in the array and in shared memory."""
        state = self._state
        if state.observer is None:
            return
        itemsize, shape = self.array.dtype.itemsize, self._addresses.shape
        words = (self._offsets[:, None] + np.arange(0, self.nbytes, CHUNK_BYTES)).reshape(-1)
        lanes = np.broadcast_to(self.lanes[:, None], shape).reshape(-1)
        access = MemoryAccess(state.site, "global", kind, self.array.name, CHUNK_BYTES, lanes, words, itemsize)
        state.observer.on_async_proxy_access(access)
        shared_kind: AccessKind = "store" if kind == "load" else "load"
        addresses = self._addresses.reshape(-1)
        shared_access = lanes, addresses, itemsize, None, 0, self.array.name
        state.observer.on_async_proxy_access(
            MemoryAccess(state.site, "shared", shared_kind, self._name, CHUNK_BYTES, *shared_access)
        )


@translates("cp_async_bulk_g2s_cluster", "cp_async_bulk_g2s_cta")
def _translate_load(op: Instruction) -> StatementCode:
    """cp.async.bulk.shared::cluster.global destination, source, bytes, mbarrier."""
    if "multicast::cluster" in op.modifiers or "ignore_oob" in op.modifiers:
        raise op.unsupported()
    state, shared, barriers = op.state, op.state.shared, op.state.mbarriers

    def load(mask: Mask) -> None:
        copy = _BulkCopy(op, mask, 0, 1)
        place = op.address(3, mask, "shared")
        address = MemoryAddress(shared, place.byte_offsets, place.name, copy.blocks)
        mbarriers = barriers.find_mbarriers(address, copy.lanes, is_async_proxy=True)
        for mbarrier in mbarriers:
            mbarrier.copies_in_flight += 1
        agents = np.array([mbarrier.writer_agent for mbarrier in mbarriers])
        shared.start_async_write(copy.chunks, copy.lanes, agents)
        copy.notify("load")
        data = copy.read_array() if state.is_checked else None

        def complete() -> None:
            if data is not None:
                shared.complete_copy(copy.chunks, data)
            for mbarrier in mbarriers:
                barriers.complete_tx(mbarrier, copy.nbytes)

        state.pending_copies.append(complete)

    return load


@translates("cp_async_bulk_s2g")
def _translate_store(op: Instruction) -> StatementCode:
    """cp.async.bulk.global.shared::cta destination, source, bytes."""
    state = op.state

    def store(mask: Mask) -> None:
        copy = _BulkCopy(op, mask, 1, 0)
        copy.notify("store")
        if state.is_checked:
            copy.write_array(state.shared.read_async(copy.chunks, copy.lanes[:, None], "a bulk copy"))
            state.bulk_copy_groups.issue(copy.lanes, copy.chunks)

    return store
