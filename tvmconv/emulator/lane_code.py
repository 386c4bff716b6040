"""Types of the Python functions that TIR is translated to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


def run_statement(code: CompiledStatement, mask: Mask) -> Iterator[WaitCondition | Fork]:
    """Execute a statement, and yield what its lanes wait for."""
    if isinstance(code, SuspendableStatement):
        yield from code.run(mask)
    else:
        code(mask)


def compose_statement(
    run: Callable[[Mask], Iterator[WaitCondition | Fork]], parts: Sequence[CompiledStatement]
) -> CompiledStatement:
    """Return a statement that a generator executes; only if one of its parts may suspend, it may."""
    if any(isinstance(part, SuspendableStatement) for part in parts):
        return SuspendableStatement(run)

    def run_to_end(mask: Mask) -> None:
        for _ in run(mask):
            pass

    return run_to_end


class TirTranslator(Protocol):
    """Interface of the TIR translator that the instructions use."""

    state: EmulatorState

    def translate_expression(self, node: Any) -> ExpressionCode:
        """Return the function that evaluates an expression."""

    def find_registers(self, node: Any) -> tuple[RegisterBuffer, ExpressionCode] | None:
        """Return the register buffer of an operand such as `acc[3]`, and the code of its index; None for others."""
