"""Instructions with their operands: parsed calls, registers and addresses.

A call of `T.ptx` has the operands first, and then the instruction's modifiers as strings, which are empty for absent
modifiers. The last string says whether a predicate follows the operands.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.memory.arrays import GlobalArray, TensorMapArray
from tvmconv.emulator.memory.registers import DeferredLoad, RegisterBuffer
from tvmconv.emulator.memory.shared_memory import MemoryAddress
from tvmconv.emulator.state import CompiledStatement, ExpressionCode, Mask, Pointer, SuspendableStatement, TirTranslator
from tvmconv.emulator.threads import CLUSTER_WINDOW_BYTES, Lanes
from tvmconv.errors import AnalysisError

PTX_PREFIX = "tirx.ptx."


@dataclass(frozen=True)
class PtxCall:
    """Name such as `ld_vec`, operands, predicate or None, and present modifiers of a call."""

    name: str
    operands: tuple[Any, ...]
    predicate: Any = None
    modifiers: tuple[str, ...] = ()

    @classmethod
    def from_node(cls, node: Any) -> PtxCall | None:
        """Return the parsed call of a node, or None for other nodes."""
        name = str(node.op.name)
        if not name.startswith(PTX_PREFIX) or name == f"{PTX_PREFIX}addr":
            return None
        strings = [str(argument.value) for argument in node.args if type(argument).__name__ == "StringImm"]
        operands = [argument for argument in node.args if type(argument).__name__ != "StringImm"]
        flags = strings[-1].split(",") if strings else []
        predicate_position = re.compile(r"p\d+")  # marks the operand at a position as a predicate
        if unknown_flags := {flag for flag in flags if not predicate_position.fullmatch(flag)} - {"", "pred", "keep"}:
            flags_text = ", ".join(sorted(unknown_flags))
            raise AnalysisError(f"PTX {name.removeprefix(PTX_PREFIX)} has the unsupported flags {flags_text}")
        predicate = operands.pop() if "pred" in flags else None
        return cls(name.removeprefix(PTX_PREFIX), tuple(operands), predicate, tuple(t for t in strings[:-1] if t))

    def __str__(self) -> str:
        return f"PTX {self.name.partition('_')[0]}.{'.'.join(self.modifiers)}"

    @cached_property
    def state_space(self) -> str:
        """State space among the modifiers; shared if there is none."""
        spaces = ("global", "shared", "local")
        return next((item for item in self.modifiers if item.partition("::")[0] in spaces), "shared")

    @cached_property
    def vector_width(self) -> tuple[int, int]:
        """Number of elements of an access, and bytes per element: (4, 4) for `v4.b32`."""
        count = next((int(modifier[1:]) for modifier in self.modifiers if modifier in ("v2", "v4", "v8")), 1)
        element_type = self.modifiers[-1]
        if not element_type[1:].isdigit() or element_type[0] not in "busf":
            raise AnalysisError(f"{self} accesses elements of the unsupported type {element_type}")
        return count, int(element_type[1:]) // 8


class Instruction:
    """A call of PTX or an intrinsic of TVM, whose translated operands are selected by their index."""

    def __init__(self, call: PtxCall, translator: TirTranslator) -> None:
        self.call, self.state, self._translator = call, translator.state, translator
        self._registers = [translator.find_registers(operand) for operand in call.operands]
        self._codes = [  # registers are translated when they are read, because most are only written
            None if registers else translator.translate_expression(operand)
            for operand, registers in zip(call.operands, self._registers, strict=True)
        ]

    def __str__(self) -> str:
        return str(self.call)

    @property
    def modifiers(self) -> tuple[str, ...]:
        """Modifiers of the call."""
        return self.call.modifiers

    @property
    def num_operands(self) -> int:
        """Number of operands."""
        return len(self._codes)

    def unsupported(self) -> AnalysisError:
        """Return the error for an instruction that cannot be executed."""
        return AnalysisError(f"{self} is not supported by the emulator")

    # --- values and addresses ---

    def code(self, index: int) -> ExpressionCode:
        """Return the function that evaluates an operand."""
        code = self._codes[index]
        if code is None:
            code = self._codes[index] = self._translator.translate_expression(self.call.operands[index])
        return code

    def constant(self, index: int) -> int:
        """Return an operand that is a number in the code."""
        return int(self.call.operands[index])

    def value(self, index: int, mask: Mask) -> Any:
        """Evaluate an operand that decides whether or where memory is accessed."""
        return self.state.evaluate_data_independent(self.code(index), mask)

    def values(self, index: int, mask: Mask) -> NDArray[Any]:
        """Evaluate an operand as `value` does in each active lane."""
        return self.state.select_lane_values(self.value(index, mask), self.state.find_lanes(mask))

    def uniform_value(self, index: int, mask: Mask) -> int:
        """Evaluate an operand that has to be the same in all active lanes."""
        return require_uniform(self.code(index)(mask), self.state.find_lanes(mask))

    def pointer(self, index: int) -> Pointer:
        """Return an operand that is a constant pointer."""
        pointer = self.code(index)(None)
        if not isinstance(pointer, Pointer):
            raise AnalysisError(f"the operand {self.call.operands[index]} of {self} is not a pointer")
        return pointer

    def address(self, index: int, mask: Mask, space: str | None = None) -> MemoryAddress:
        """Return what an address operand refers to in each active lane; `space` is that of the call by default."""
        space = space or self.call.state_space
        value, state, lanes = self.value(index, mask), self.state, self.state.find_lanes(mask)
        if isinstance(value, Pointer):
            if isinstance(value.memory, RegisterBuffer | TensorMapArray):
                raise AnalysisError(f"{self} cannot access {value.name}, which is not in addressable memory")
            if space == "global" and not isinstance(value.memory, GlobalArray):
                raise ExecutionError(f"{self} accesses {value.name}, which is not in global memory")
            offsets = state.select_lane_values(value.byte_offset, lanes).astype(np.int64)
            return MemoryAddress(value.memory, offsets, value.name)
        if not space.startswith("shared"):
            raise AnalysisError(f"{self} uses an address of unknown memory")
        offsets = state.select_lane_values(value, lanes).astype(np.int64)
        target_blocks = None
        if space == "shared::cluster":
            window_index, offsets = offsets // CLUSTER_WINDOW_BYTES, offsets % CLUSTER_WINDOW_BYTES
            own_blocks = lanes // state.threads.lanes_per_block
            cluster_size = state.threads.cluster_size
            if int(window_index.max(initial=0)) > cluster_size:
                raise ExecutionError(f"{self} accesses a block outside of the cluster of {cluster_size} blocks")
            peer_blocks = own_blocks - own_blocks % cluster_size + window_index - 1
            target_blocks = np.where(window_index == 0, own_blocks, peer_blocks)
        elif offsets.size and int(offsets.max()) >= CLUSTER_WINDOW_BYTES:
            raise ExecutionError(f"{self} accesses another block's shared memory, which requires shared::cluster")
        name = state.find_buffer_name(int(offsets[0])) if offsets.size else ""
        return MemoryAddress(state.shared, offsets, name, target_blocks)

    # --- registers ---

    def registers(self, index: int) -> tuple[RegisterBuffer, ExpressionCode]:
        """Return the register buffer of an operand such as `acc[3]`, and the code of its index."""
        registers = self._registers[index]
        if registers is None:
            raise AnalysisError(f"the operand {self.call.operands[index]} is not a register")
        return registers

    def evaluate(self, first: int, count: int, mask: Mask) -> None:
        """Evaluate operands without using their values, to notify of deferred loads."""
        for index in range(first, first + count):
            self.code(index)(mask)

    def read(self, first: int, count: int, mask: Mask, itemsize: int) -> NDArray[Any]:
        """Return the bits of operands as unsigned integers, of shape (operands, lanes)."""
        lanes = self.state.find_lanes(mask)
        return np.stack([extract_bits(self.code(first + i)(mask), lanes, itemsize) for i in range(count)])

    def write(self, mask: Mask, columns: NDArray[Any], *, depends_on_memory: bool = True) -> None:
        """Write unsigned integers of shape (lanes, registers), zero-extended to the width of the registers."""
        lanes = self.state.find_lanes(mask)
        for column in range(columns.shape[1]):
            registers, index = self.registers(column)
            bits, all_lanes = columns[:, column], mask is None
            element = require_uniform(index(mask), lanes)
            write_bits(registers, element, lanes, bits, all_lanes=all_lanes, depends_on_memory=depends_on_memory)

    def mark_written(self, count: int, mask: Mask, notify: Callable[[Mask], None] | None = None) -> None:
        """Mark the first registers as written with values that depend on memory.

        The compiler drops a load if no lane reads its registers, so `notify`, which notifies the observer of the load
        for the lanes of a mask, is deferred until lanes read them.
        """
        lanes = self.state.find_lanes(mask)
        deferred = None if notify is None else DeferredLoad(notify, mask)
        for operand in range(count):
            registers, index = self.registers(operand)
            element = require_uniform(index(mask), lanes)
            previous = registers.deferred_loads.pop(element, None)
            if previous is not None and not previous.has_mask(mask):
                previous.notify_read(None)
            if deferred is not None:
                registers.deferred_loads[element] = deferred
            registers.is_written[element, slice(None) if mask is None else lanes] = True
            registers.depends_on_memory[element] = True


# Translation of each supported PTX instruction; the modules of instructions fill it.
TRANSLATORS: dict[str, Callable[[Instruction], CompiledStatement]] = {}


def translates(*names: str) -> Callable[[Callable[[Instruction], CompiledStatement]], Any]:
    """Register a function that returns the code of instructions."""

    def register(translate: Callable[[Instruction], CompiledStatement]) -> Any:
        TRANSLATORS.update(dict.fromkeys(names, translate))
        return translate

    return register


def executes(*names: str) -> Callable[[Callable[[Instruction, Mask], Iterator[Any] | None]], Any]:
    """Register a function that executes instructions for the lanes of a mask; a generator yields waits."""

    def register(execute: Callable[[Instruction, Mask], Any]) -> Any:
        TRANSLATORS.update(dict.fromkeys(names, lambda op: bind(execute, op)))
        return execute

    return register


def bind(execute: Callable[[Instruction, Mask], Any], op: Instruction) -> CompiledStatement:
    """Return the code of an instruction from the function that executes it."""
    run = partial(execute, op)
    return SuspendableStatement(run) if inspect.isgeneratorfunction(execute) else run


def extract_bits(value: Any, lanes: Lanes, itemsize: int) -> NDArray[Any]:
    """Return the bits of a value in some lanes as unsigned integers."""
    values = np.asarray(value)
    values = np.full(len(lanes), values) if values.ndim == 0 else values[lanes]
    if values.dtype.kind in "iub":
        return values.astype(np.int64).astype(f"u{itemsize}")
    if values.dtype.itemsize != itemsize:
        raise AnalysisError(f"a register of type {values.dtype} is used as an operand of {itemsize} bytes")
    return np.ascontiguousarray(values).view(f"u{itemsize}")


def require_uniform(value: Any, lanes: Lanes) -> int:
    """Return a number that has to be the same in all lanes."""
    if isinstance(value, int):
        return value
    values = np.asarray(value)
    values = values if values.ndim == 0 else values[lanes]
    first = int(values.reshape(-1)[0])
    if (values != first).any():
        raise AnalysisError("register indices that differ between lanes are not supported")
    return first


def write_bits(
    registers: RegisterBuffer,
    element: int,
    lanes: Lanes,
    bits: NDArray[Any],
    *,
    all_lanes: bool,
    depends_on_memory: bool = True,
) -> None:
    """Write bits to registers of some lanes, or of all; `depends_on_memory` is recorded for the element."""
    data = registers.data
    if not 0 <= element < len(data):
        raise ExecutionError(f"out of bounds: element {element} of {registers.name}, which has {len(data)}")
    if data.dtype.itemsize < bits.dtype.itemsize:
        raise AnalysisError(f"{bits.dtype.itemsize} bytes do not fit a register of {registers.name}, a {data.dtype}")
    if registers.accumulators is not None:
        written_mask = None if all_lanes else np.isin(np.arange(data.shape[1]), lanes)
        registers.accumulators.check_access(element, written_mask)
    written_lanes = slice(None) if all_lanes else lanes
    data.view(f"u{data.dtype.itemsize}")[element, written_lanes] = bits
    registers.is_written[element, written_lanes] = True
    registers.depends_on_memory[element] = depends_on_memory or (
        not all_lanes and bool(registers.depends_on_memory[element])
    )
