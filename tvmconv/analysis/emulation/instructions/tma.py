"""Copies by the Tensor Memory Accelerator, executed.

A copy to shared memory lands as late as it can, which is when nobody can go on without it. Source: PTX ISA,
"cp.async.bulk.tensor".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.addresses import CHUNK
from tvmconv.analysis.emulation.compiled import Compiler, Pointer, Run
from tvmconv.analysis.emulation.errors import ExecutionError
from tvmconv.analysis.emulation.instructions.boxes import Box, Words, pixels, swizzled, tiles, words_of
from tvmconv.analysis.emulation.instructions.operands import Call, address_of, nothing
from tvmconv.analysis.emulation.machine import Machine, Mask
from tvmconv.analysis.emulation.memory.arrays import Mapped
from tvmconv.analysis.emulation.memory.shared import Address
from tvmconv.analysis.emulation.threads import Lanes
from tvmconv.analysis.emulation.watch import Accessed, Kind
from tvmconv.arithmetic import ceil_div
from tvmconv.errors import AnalysisError

ALIGNMENT = 128  # bytes, of where a tile lies in shared memory


class _Tensor:
    """The operands of a copy that tell what of an array it takes.

    Args:
        call: the instruction.
        compiler: for its operands.
        at: which operand is the map; the place is behind it.
        offsets: which operands are the offsets of im2col.
    """

    def __init__(self, call: Call, compiler: Compiler, at: int, offsets: int | None = None) -> None:
        rank = next(int(each[0]) for each in call.modifiers if each in ("1d", "2d", "3d", "4d", "5d"))
        self.behind = at + 1 + rank
        self._call, self._machine = call, compiler.machine
        pointer = compiler.code(call.operands[at])(None)
        if not isinstance(pointer, Pointer) or not isinstance(pointer.memory, Mapped):
            raise AnalysisError(f"{call} of what is no tensor map")
        self.of = pointer.memory
        told = self.of.told
        if len(told.extents) != rank or told.is_im2col != (offsets is not None):
            raise ExecutionError(f"{call} with {told}")
        self._place = [compiler.code(each) for each in call.operands[at + 1 : self.behind]]
        taps = [] if offsets is None else call.operands[self.behind + offsets : self.behind + offsets + rank - 2]
        self._taps = [compiler.code(each) for each in taps]

    @property
    def nbytes(self) -> int:
        """Of a copy."""
        told = self.of.told
        rows = (
            told.box[1:]
            if told.is_im2col
            else (ceil_div(b, s) for b, s in zip(told.box[1:], told.steps[1:], strict=True))
        )
        return told.box[0] * self.of.array.dtype.itemsize * math.prod(rows)

    def box(self, mask: Mask, lanes: Lanes) -> Box:
        """What each lane takes."""
        at = self._values(self._place, mask, lanes)
        if not self._taps:
            return tiles(self.of.told, at)
        return pixels(self.of.told, at, self._values(self._taps, mask, lanes))

    def _values(self, codes: list[Callable[[Mask], Any]], mask: Mask, lanes: Lanes) -> NDArray[np.int64]:
        machine = self._machine
        rows = [machine.rows(machine.decided(code, mask), lanes).astype(np.int64) for code in codes]
        return np.stack(rows, axis=1)

    def chunks(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the chunks of copies lie that begin at addresses in shared memory, shape (copies, chunks)."""
        if (addresses % ALIGNMENT).any():
            raise ExecutionError(
                f"misaligned: {self._call} of shared memory at byte {int(addresses[addresses % ALIGNMENT != 0][0])}, "
                f"no multiple of {ALIGNMENT}"
            )
        return swizzled(addresses[:, None] + np.arange(0, self.nbytes, CHUNK), self.of.told.swizzle)

    def read(self, words: Words) -> NDArray[np.uint8]:
        """What words of the array are, zeros where there are none; shape (copies, chunks, 16)."""
        found = self.of.array.raw.reshape(-1, words.size)[words.index]
        found[~words.inside] = 0
        return found.reshape(len(found), -1, CHUNK)

    def tell(self, kind: Any, words: Words, lanes: Lanes, chunks: NDArray[np.int64], owners: Lanes) -> None:
        """Tell who watches of words of the array, and chunks of shared memory of the blocks of `owners`."""
        machine, array = self._machine, self.of.array
        if machine.watch is None:
            return
        itemsize = array.dtype.itemsize
        who = np.broadcast_to(lanes[:, None, None], words.index.shape)[words.inside]
        at = words.index[words.inside] * words.size
        machine.watch.bulk(Accessed(machine.site, "global", kind, array.name, words.size, who, at, itemsize))
        other: Kind = "store" if kind == "load" else "load"
        name, who = machine.buffer_at(int(chunks[0, 0])), np.repeat(owners, chunks.shape[1])
        at = chunks.reshape(-1)
        told = Accessed(machine.site, "shared", other, name, CHUNK, who, at, itemsize)
        machine.watch.bulk(replace(told, swizzle=self.of.told.swizzle, array=array.name))


def _load(call: Call, compiler: Compiler) -> Run:
    """cp.async.bulk.tensor.*.shared::cluster.global: to, map, place, mbarrier{, offsets of a tap}{, blocks}."""
    im2col = "im2col" in call.modifiers
    if any(each.startswith("im2col::") for each in call.modifiers) or "tile::gather4" in call.modifiers:
        raise AnalysisError(f"{call}, which cannot be executed")
    tensor = _Tensor(call, compiler, 1, 1 if im2col else None)
    machine, shared, barriers = compiler.machine, compiler.machine.shared, compiler.machine.mbarriers
    to, barrier = compiler.code(call.operands[0]), compiler.code(call.operands[tensor.behind])
    behind = tensor.behind + 1 + (len(tensor.of.told.lower) if im2col else 0)
    everywhere = compiler.code(call.operands[behind]) if "multicast::cluster" in call.modifiers else None

    def load(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        where, signal = (address_of(call, machine.decided(code, mask), machine, lanes) for code in (to, barrier))
        seen = machine.checked or machine.tells_bulk
        words = words_of(tensor.of, tensor.box(mask, lanes)) if seen else None
        data = tensor.read(words) if words and machine.checked else None
        which, blocks = _targets(machine, where, lanes, machine.decided(everywhere, mask) if everywhere else None)
        who = lanes[which]
        told = barriers.find(Address(shared, signal.at[which], signal.name, blocks), who, by_async=True)
        for each in told:
            each.under_way += 1
        if words:
            places = tensor.chunks(where.at[which])
            chunks = shared.chunks(places, blocks)
            shared.write_async(chunks, who, np.array([each.agent for each in told]))
            owners = blocks * machine.threads.padded + who % machine.threads.padded
            tensor.tell("load", words, lanes, places, owners)

        def land() -> None:
            if data is not None:
                shared.land(chunks, data[which])
            for each in told:
                barriers.land(each, tensor.nbytes)

        machine.under_way.append(land)

    return load


def _targets(machine: Machine, where: Address, lanes: Lanes, everywhere: Any) -> tuple[NDArray[np.intp], Lanes]:
    """Which copy goes to which block, of copies of some lanes."""
    own = lanes // machine.threads.padded
    if everywhere is None:
        return np.arange(len(lanes)), own if where.blocks is None else where.blocks
    cluster = machine.threads.cluster
    bits = machine.rows(everywhere, lanes).astype(np.int64)[:, None] >> np.arange(16) & 1
    if bits[:, cluster:].any():
        raise ExecutionError(f"a copy to block {int(np.flatnonzero(bits.any(axis=0))[-1])} of a cluster of {cluster}")
    which, rank = np.nonzero(bits)
    return which, own[which] - own[which] % cluster + rank


def _store(call: Call, compiler: Compiler) -> Run:
    """cp.async.bulk.tensor.*.global.shared::cta: map, place, from."""
    if "tile::scatter4" in call.modifiers:
        raise AnalysisError(f"{call}, which cannot be executed")
    tensor = _Tensor(call, compiler, 0)
    source, machine = compiler.code(call.operands[tensor.behind]), compiler.machine
    plain = Call(call.name, (), None, ("shared::cta",))

    def store(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        where = address_of(plain, machine.decided(source, mask), machine, lanes)
        if not (machine.checked or machine.tells_bulk):
            return
        places = tensor.chunks(where.at)
        words = words_of(tensor.of, tensor.box(mask, lanes))
        tensor.tell("store", words, lanes, places, lanes)
        if not machine.checked:
            return
        chunks = machine.shared.chunks(places, lanes // machine.threads.padded)
        found = machine.shared.read_async(chunks, lanes[:, None], "a bulk copy")
        rows = np.ascontiguousarray(found).reshape(*words.index.shape, words.size)
        tensor.of.array.raw.reshape(-1, words.size)[words.index[words.inside]] = rows[words.inside]
        for lane, read in zip(lanes.tolist(), chunks, strict=True):
            machine.bulk_groups.issue(lane, read)

    return store


def _commit(call: Call, compiler: Compiler) -> Run:
    machine = compiler.machine
    return lambda mask: machine.bulk_groups.commit(machine.lanes(mask))


def _wait(call: Call, compiler: Compiler) -> Run:
    machine, pending = compiler.machine, int(call.operands[0])
    return lambda mask: machine.bulk_groups.wait(machine.lanes(mask), pending)


INSTRUCTIONS: dict[str, Callable[[Call, Compiler], Run]] = {
    "cp_async_bulk_tensor_g2s_cluster": _load,
    "cp_async_bulk_tensor_g2s_cta": _load,
    "cp_async_bulk_tensor_g2s_cluster_im2col": _load,
    "cp_async_bulk_tensor_g2s_cta_im2col": _load,
    "cp_async_bulk_tensor_s2g": _store,
    "cp_async_bulk_tensor_prefetch": nothing,
    "cp_async_bulk_tensor_prefetch_im2col": nothing,
    "cp_async_bulk_prefetch": nothing,
    "cp_async_bulk_commit_group": _commit,
    "cp_async_bulk_wait_group": _wait,
}
