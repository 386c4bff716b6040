"""What TIR is translated to: Python functions of the lanes that take part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tvmconv.analysis.emulation.machine import Machine, Mask
from tvmconv.analysis.emulation.memory.arrays import Array, Mapped
from tvmconv.analysis.emulation.memory.registers import Registers
from tvmconv.analysis.emulation.memory.shared import Shared

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.synchronization.strands import Fork, Wait

Code = Callable[[Mask], Any]  # evaluates an expression: a number, an array of one for each lane, or a Pointer
Run = Callable[[Mask], None]  # executes a statement


@dataclass(frozen=True)
class Pointer:
    """Where a pointer points to: a memory and a place in bytes, one for all lanes or for each."""

    memory: Array | Mapped | Registers | Shared
    offset: Any
    name: str


@dataclass(frozen=True)
class Waiting:
    """A statement at which lanes may have to wait: `run` yields what for, and goes on when that has come."""

    run: Callable[[Mask], Iterator[Wait | Fork]]


Statement: TypeAlias = Run | Waiting


class Compiler(Protocol):
    """What the instructions ask of what compiles TIR."""

    machine: Machine

    def code(self, node: Any) -> Code:
        """How to evaluate an expression."""

    def registers(self, node: Any) -> tuple[Registers, Code]:
        """The registers that an operand such as `acc[3]` is, and the index in them."""
