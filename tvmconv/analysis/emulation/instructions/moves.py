"""Instructions that move elements between registers and memory, and addresses between the blocks of a cluster.

Source: PTX ISA, "Data Movement and Conversion Instructions".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tvmconv.analysis.emulation.addresses import CLUSTER_WINDOW
from tvmconv.analysis.emulation.compiled import Compiler, Run
from tvmconv.analysis.emulation.errors import ExecutionError
from tvmconv.analysis.emulation.instructions.operands import Call, Destinations, Sources, address_of
from tvmconv.analysis.emulation.machine import Mask
from tvmconv.analysis.emulation.memory.arrays import Array
from tvmconv.analysis.emulation.memory.shared import Shared


def _load(call: Call, compiler: Compiler) -> Run:
    count, itemsize = call.width
    destinations = Destinations(call.operands[:count], compiler)
    address = compiler.code(call.operands[count])
    machine = compiler.machine

    def load(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        where = address_of(call, machine.decided(address, mask), machine, lanes)
        told = where.memory.dtype.itemsize if isinstance(where.memory, Array) else itemsize

        def reach(reading: Mask) -> None:
            some = slice(None) if reading is None else reading[lanes]
            machine.reach(where.memory, "load", where.name, lanes[some], where.at[some], count * itemsize, told)

        if not machine.checked and isinstance(where.memory, Shared) and where.blocks is None:
            return destinations.mark(mask, lanes, machine.later(reach))
        found = machine.load_bytes(where.memory, where.at, count * itemsize, lanes, where.name, told, where.blocks)
        if not machine.checked:
            return destinations.mark(mask, lanes)
        destinations.write(mask, lanes, found.view(f"u{itemsize}"))

    return load


def _store(call: Call, compiler: Compiler) -> Run:
    count, itemsize = call.width
    address = compiler.code(call.operands[0])
    sources = Sources(call.operands[1 : 1 + count], compiler)
    machine = compiler.machine

    def store(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        where = address_of(call, machine.decided(address, mask), machine, lanes)
        told = where.memory.dtype.itemsize if isinstance(where.memory, Array) else itemsize
        if not machine.checked:
            sources.touch(mask)
            nbytes = count * itemsize
            return machine.reach(where.memory, "store", where.name, lanes, where.at, nbytes, told, where.blocks)
        rows = np.ascontiguousarray(sources.read(mask, lanes, itemsize).T).view(np.uint8)
        machine.store_bytes(where.memory, where.at, rows, lanes, where.name, told, where.blocks)

    return store


def _map_to_peer(call: Call, compiler: Compiler) -> Run:
    """mapa: the address in the shared memory of another block of the cluster that an own address corresponds to."""
    destinations = Destinations(call.operands[:1], compiler)
    address, rank = compiler.code(call.operands[1]), compiler.code(call.operands[2])
    machine = compiler.machine

    def peer(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        own, which = (machine.rows(machine.decided(code, mask), lanes).astype(np.int64) for code in (address, rank))
        if which.size and not 0 <= int(which.min()) <= int(which.max()) < machine.threads.cluster:
            raise ExecutionError(f"{call}: block {int(which.max())} of a cluster of {machine.threads.cluster}")
        found = own % CLUSTER_WINDOW + (which + 1) * CLUSTER_WINDOW
        destinations.write(mask, lanes, found.astype(np.uint32)[:, None], loaded=False)

    return peer


INSTRUCTIONS: dict[str, Callable[[Call, Compiler], Run]] = {
    "ld": _load,
    "ld_vec": _load,
    "st": _store,
    "st_vec": _store,
    "mapa_u32": _map_to_peer,
}
