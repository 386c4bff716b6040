"""Loads and stores between registers and memory, and the mapping of addresses between the blocks of a cluster.

Source: PTX ISA, "Data Movement and Conversion Instructions".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tvmconv.emulator.addresses import CLUSTER_WINDOW_BYTES
from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions.operands import DestinationOperands, PtxCall, SourceOperands, resolve_address
from tvmconv.emulator.lane_code import StatementCode, TirTranslator
from tvmconv.emulator.memory.arrays import GlobalArray
from tvmconv.emulator.memory.shared_memory import SharedMemory
from tvmconv.emulator.state import Mask


def _translate_load(call: PtxCall, translator: TirTranslator) -> StatementCode:
    count, itemsize = call.vector_width
    nbytes = count * itemsize
    destinations = DestinationOperands(call.operands[:count], translator)
    address = translator.translate_expression(call.operands[count])
    state = translator.state

    def load(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        location = resolve_address(call, state.evaluate_data_independent(address, mask), state, lanes)
        memory, name, offsets = location.memory, location.name, location.byte_offsets
        element_bytes = memory.dtype.itemsize if isinstance(memory, GlobalArray) else itemsize

        def note_lanes(mask: Mask) -> None:
            selection = slice(None) if mask is None else mask[lanes]
            state.note_access(memory, "load", name, lanes[selection], offsets[selection], nbytes, element_bytes)

        if not state.is_checked and isinstance(memory, SharedMemory) and location.target_blocks is None:
            return destinations.mark_written(mask, lanes, state.defer_access(note_lanes))
        loaded = state.load_bytes(memory, offsets, nbytes, lanes, name, element_bytes, location.target_blocks)
        if not state.is_checked:
            return destinations.mark_written(mask, lanes)
        destinations.write(mask, lanes, loaded.view(f"u{itemsize}"))

    return load


def _translate_store(call: PtxCall, translator: TirTranslator) -> StatementCode:
    count, itemsize = call.vector_width
    address = translator.translate_expression(call.operands[0])
    sources = SourceOperands(call.operands[1 : 1 + count], translator)
    state = translator.state

    def store(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        location = resolve_address(call, state.evaluate_data_independent(address, mask), state, lanes)
        memory, name, offsets = location.memory, location.name, location.byte_offsets
        blocks = location.target_blocks
        element_bytes = memory.dtype.itemsize if isinstance(memory, GlobalArray) else itemsize
        if not state.is_checked:
            sources.evaluate(mask)
            return state.note_access(memory, "store", name, lanes, offsets, count * itemsize, element_bytes, blocks)
        stored_bytes = np.ascontiguousarray(sources.read(mask, lanes, itemsize).T).view(np.uint8)
        state.store_bytes(memory, offsets, stored_bytes, lanes, name, element_bytes, blocks)

    return store


def _translate_mapa(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """Translate mapa d, a, rank, which maps a shared address to the same location in another block of the cluster."""
    destinations = DestinationOperands(call.operands[:1], translator)
    codes = [translator.translate_expression(operand) for operand in call.operands[1:3]]
    state = translator.state

    def map_address(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        own_addresses, cta_ranks = (state.evaluate_lanes(code, mask, lanes).astype(np.int64) for code in codes)
        cluster_size = state.threads.cluster_size
        if cta_ranks.size and not 0 <= int(cta_ranks.min()) <= int(cta_ranks.max()) < cluster_size:
            raise ExecutionError(f"{call}: rank {int(cta_ranks.max())} is outside the cluster of {cluster_size} blocks")
        peer_addresses = own_addresses % CLUSTER_WINDOW_BYTES + (cta_ranks + 1) * CLUSTER_WINDOW_BYTES
        destinations.write(mask, lanes, peer_addresses.astype(np.uint32)[:, None], depends_on_memory=False)

    return map_address


INSTRUCTIONS: dict[str, Callable[[PtxCall, TirTranslator], StatementCode]] = {
    "ld": _translate_load,
    "ld_vec": _translate_load,
    "st": _translate_store,
    "st_vec": _translate_store,
    "mapa_u32": _translate_mapa,
}
