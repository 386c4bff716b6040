"""The operands of GPU instructions, for execution: calls taken apart, registers, addresses.

A call of `T.ptx` has the operands first and then, as text, the instruction's modifiers, empty where there is none; the
last text says whether a predicate follows the operands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.addresses import CLUSTER_WINDOW
from tvmconv.analysis.emulation.compiled import Compiler, Pointer, Run
from tvmconv.analysis.emulation.errors import ExecutionError
from tvmconv.analysis.emulation.machine import Machine, Mask
from tvmconv.analysis.emulation.memory.arrays import Array, Mapped
from tvmconv.analysis.emulation.memory.registers import Later, Registers
from tvmconv.analysis.emulation.memory.shared import Address
from tvmconv.analysis.emulation.threads import Lanes
from tvmconv.errors import AnalysisError

PTX = "tirx.ptx."


@dataclass(frozen=True)
class Call:
    """A call of `T.ptx`, taken apart.

    Attributes:
        name: of the operator, such as `ld_vec`.
        operands: of the instruction, without its predicate.
        predicate: on which it depends, or None.
        modifiers: those that are there, in their order.
    """

    name: str
    operands: tuple[Any, ...]
    predicate: Any
    modifiers: tuple[str, ...]

    @classmethod
    def of(cls, node: Any) -> Call | None:
        """The call that a node is, if it is one."""
        name = str(node.op.name)
        if not name.startswith(PTX) or name == f"{PTX}addr":
            return None
        texts = [str(each.value) for each in node.args if type(each).__name__ == "StringImm"]
        operands = [each for each in node.args if type(each).__name__ != "StringImm"]
        flags = texts[-1].split(",") if texts else []
        operand = re.compile(r"p\d+")  # of operand so and so, that it is a predicate
        if unknown := {flag for flag in flags if not operand.fullmatch(flag)} - {"", "pred", "keep"}:
            raise AnalysisError(f"PTX {name.removeprefix(PTX)} with {', '.join(sorted(unknown))}")
        predicate = operands.pop() if "pred" in flags else None
        return cls(name.removeprefix(PTX), tuple(operands), predicate, tuple(t for t in texts[:-1] if t))

    def __str__(self) -> str:
        return f"PTX {self.name.partition('_')[0]}.{'.'.join(self.modifiers)}"

    @property
    def space(self) -> str | None:
        """The state space that it names."""
        spaces = [each for each in self.modifiers if each.partition("::")[0] in ("global", "shared", "local")]
        return spaces[0] if spaces else None

    @property
    def width(self) -> tuple[int, int]:
        """How many elements an access has, and the bytes of one: of `v4.b32`, 4 and 4."""
        count = next((int(each[1:]) for each in self.modifiers if each in ("v2", "v4", "v8")), 1)
        kind = self.modifiers[-1]
        if not kind[1:].isdigit() or kind[0] not in "busf":
            raise AnalysisError(f"{self}: elements of the type {kind}")
        return count, int(kind[1:]) // 8


def bits_of(value: Any, lanes: Lanes, itemsize: int) -> NDArray[Any]:
    """The bits of a value in some lanes, as unsigned integers."""
    found = np.asarray(value)
    found = np.full(len(lanes), found) if found.ndim == 0 else found[lanes]
    if found.dtype.kind in "iub":
        return found.astype(np.int64).astype(f"u{itemsize}")
    if found.dtype.itemsize != itemsize:
        raise AnalysisError(f"a register of {found.dtype} where there are {itemsize} bytes")
    return np.ascontiguousarray(found).view(f"u{itemsize}")


def same(value: Any, lanes: Lanes) -> int:
    """A number that is the same in all lanes."""
    if isinstance(value, int):
        return value
    found = np.asarray(value)
    found = found if found.ndim == 0 else found[lanes]
    first = int(found.reshape(-1)[0])
    if (found != first).any():
        raise AnalysisError("registers that are chosen by lane")
    return first


class Destinations:
    """Registers that an instruction writes."""

    def __init__(self, operands: Sequence[Any], compiler: Compiler) -> None:
        self._operands = [compiler.registers(operand) for operand in operands]

    def write(self, mask: Mask, lanes: Lanes, columns: NDArray[Any], *, loaded: bool = True) -> None:
        """Write unsigned integers of shape (lanes, registers), widened as far as the registers are wider."""
        for i, (registers, index) in enumerate(self._operands):
            write_bits(registers, same(index(mask), lanes), lanes, columns[:, i], whole=mask is None, loaded=loaded)

    def mark(self, mask: Mask, lanes: Lanes, told: Callable[[Mask], None] | None = None) -> None:
        """Note that they are written, with what depends on memory and does not matter.

        Args:
            mask: the lanes.
            lanes: the same.
            told: tells of the load that they come from, for the lanes of a mask: the compiler drops it if nobody reads
                any of them, and does it where they are read.
        """
        later = None if told is None else Later(told, mask)
        for registers, index in self._operands:
            at = same(index(mask), lanes)
            before = registers.waiting.pop(at, None)
            if before is not None and not before.is_of(mask):
                before.tell(None)
            if later is not None:
                registers.waiting[at] = later
            registers.written[at, slice(None) if mask is None else lanes] = True
            registers.loaded[at] = True


def write_bits(
    registers: Registers, at: int, lanes: Lanes, bits: NDArray[Any], *, whole: bool, loaded: bool = True
) -> None:
    """Write bits to registers; `whole` says to those of all lanes, `loaded` that they depend on memory."""
    data = registers.data
    if not 0 <= at < len(data):
        raise ExecutionError(f"out of bounds: element {at} of {registers.name}, which has {len(data)}")
    if data.dtype.itemsize < bits.dtype.itemsize:
        raise AnalysisError(f"{bits.dtype.itemsize} bytes for a register of {registers.name}, which is narrower")
    if registers.accumulators is not None:
        registers.accumulators.touch(at, None if whole else np.isin(np.arange(data.shape[1]), lanes))
    row = data.view(f"u{data.dtype.itemsize}")[at]
    if whole:
        row[:] = bits
        registers.written[at] = True
        registers.loaded[at] = loaded
    else:
        row[lanes] = bits
        registers.written[at, lanes] = True
        registers.loaded[at] |= loaded


class Sources:
    """Registers, or other values, that an instruction reads."""

    def __init__(self, operands: Sequence[Any], compiler: Compiler) -> None:
        self._codes = [compiler.code(operand) for operand in operands]

    def touch(self, mask: Mask) -> None:
        """Read them where what they are does not matter."""
        for code in self._codes:
            code(mask)

    def read(self, mask: Mask, lanes: Lanes, itemsize: int) -> NDArray[Any]:
        """Their bits, of shape (registers, lanes)."""
        return np.stack([bits_of(code(mask), lanes, itemsize) for code in self._codes])


def address_of(call: Call, value: Any, machine: Machine, lanes: Lanes) -> Address:
    """Where an operand that is an address points to, in some lanes."""
    if isinstance(value, Pointer):
        if isinstance(value.memory, Registers | Mapped):
            raise AnalysisError(f"{call} on {value.name}, which is no memory that it could access")
        if call.space == "global" and not isinstance(value.memory, Array):
            raise ExecutionError(f"{call} on {value.name}, which does not lie in global memory")
        return Address(value.memory, machine.rows(value.offset, lanes).astype(np.int64), value.name)
    if not (call.space or "shared").startswith("shared"):
        raise AnalysisError(f"{call} at an address of which it is not known what lies there")
    at = machine.rows(value, lanes).astype(np.int64)
    blocks = None
    if call.space == "shared::cluster":
        window, at = at // CLUSTER_WINDOW, at % CLUSTER_WINDOW
        own = lanes // machine.threads.padded
        cluster = machine.threads.cluster
        if int(window.max(initial=0)) > cluster:
            raise ExecutionError(f"{call}: no such block in the cluster")
        blocks = np.where(window == 0, own, own - own % cluster + window - 1)
    elif at.size and int(at.max()) >= CLUSTER_WINDOW:
        raise ExecutionError(f"{call} at an address of another block: it needs shared::cluster")
    name = machine.buffer_at(int(at[0])) if at.size else ""
    return Address(machine.shared, at, name, blocks)


def nothing(call: Call, compiler: Compiler) -> Run:
    """What changes nothing that is executed here: hints, and what orders what is in order."""
    return lambda mask: None
