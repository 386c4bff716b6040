"""Types of the Python functions that TIR is translated to."""

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

ExpressionCode = Callable[[Mask], Any]  # evaluates an expression: a number, an array with one per lane, or a Pointer
StatementCode = Callable[[Mask], None]  # executes a statement for the lanes of a mask


@dataclass(frozen=True)
class Pointer:
    """Memory object and byte offset that a pointer refers to; the offset is a number or an array with one per lane."""

    memory: GlobalArray | TensorMapArray | RegisterBuffer | SharedMemory
    byte_offset: Any
    name: str


@dataclass(frozen=True)
class SuspendableStatement:
    """Statement at which lanes may wait: `run` yields a condition, and continues once that is ready."""

    run: Callable[[Mask], Iterator[WaitCondition | Fork]]


CompiledStatement: TypeAlias = StatementCode | SuspendableStatement


class TirTranslator(Protocol):
    """Interface of the TIR translator that the instructions use."""

    state: EmulatorState

    def translate_expression(self, node: Any) -> ExpressionCode:
        """Return the function that evaluates an expression."""

    def find_registers(self, node: Any) -> tuple[RegisterBuffer, ExpressionCode] | None:
        """Return the register buffer of an operand such as `acc[3]`, and the code of its index; None for others."""
