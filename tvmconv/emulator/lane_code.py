"""What TIR is translated to: Python functions of the lanes that take part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tvmconv.emulator.memory.arrays import GlobalArray, TensorMapArray
from tvmconv.emulator.memory.registers import RegisterBuffer
from tvmconv.emulator.memory.shared_memory import SharedMemory
from tvmconv.emulator.state import EmulatorState, Mask

if TYPE_CHECKING:
    from tvmconv.emulator.synchronization.fibers import Fork, WaitCondition

ExpressionCode = Callable[[Mask], Any]  # evaluates an expression: a number, an array of one for each lane, or a Pointer
StatementCode = Callable[[Mask], None]  # executes a statement


@dataclass(frozen=True)
class Pointer:
    """Where a pointer points to: a memory and a place in bytes, one for all lanes or for each."""

    memory: GlobalArray | TensorMapArray | RegisterBuffer | SharedMemory
    byte_offset: Any
    name: str


@dataclass(frozen=True)
class SuspendableStatement:
    """A statement at which lanes may have to wait: `run` yields what for, and goes on when that has come."""

    run: Callable[[Mask], Iterator[WaitCondition | Fork]]


CompiledStatement: TypeAlias = StatementCode | SuspendableStatement


class TirTranslator(Protocol):
    """What the instructions ask of what compiles TIR."""

    state: EmulatorState

    def translate_expression(self, node: Any) -> ExpressionCode:
        """How to evaluate an expression."""

    def resolve_registers(self, node: Any) -> tuple[RegisterBuffer, ExpressionCode]:
        """The registers that an operand such as `acc[3]` is, and the index in them."""
