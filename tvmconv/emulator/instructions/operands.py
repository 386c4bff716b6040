"""Operands of GPU instructions: parsed calls, registers and addresses.

A call of `T.ptx` has the operands first, and then the instruction's modifiers as strings, which are empty for absent
modifiers. The last string says whether a predicate follows the operands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.addresses import CLUSTER_WINDOW_BYTES
from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.lane_code import Pointer, StatementCode, TirTranslator
from tvmconv.emulator.memory.arrays import GlobalArray, TensorMapArray
from tvmconv.emulator.memory.registers import DeferredLoad, RegisterBuffer
from tvmconv.emulator.memory.shared_memory import MemoryAddress
from tvmconv.emulator.state import EmulatorState, Mask
from tvmconv.emulator.threads import Lanes
from tvmconv.errors import AnalysisError

PTX_PREFIX = "tirx.ptx."


@dataclass(frozen=True)
class PtxCall:
    """Parsed call of `T.ptx`.

    Attributes:
        name: Name of the operator, such as `ld_vec`.
        operands: Operands of the instruction without its predicate.
        predicate: Predicate of the instruction, or None.
        modifiers: Modifiers that are present, in their order.
    """

    name: str
    operands: tuple[Any, ...]
    predicate: Any
    modifiers: tuple[str, ...]

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

    @property
    def state_space(self) -> str | None:
        """State space among the modifiers, or None."""
        state_spaces = ("global", "shared", "local")
        return next((item for item in self.modifiers if item.partition("::")[0] in state_spaces), None)

    @property
    def vector_width(self) -> tuple[int, int]:
        """Number of elements of an access, and bytes per element: (4, 4) for `v4.b32`."""
        count = next((int(modifier[1:]) for modifier in self.modifiers if modifier in ("v2", "v4", "v8")), 1)
        element_type = self.modifiers[-1]
        if not element_type[1:].isdigit() or element_type[0] not in "busf":
            raise AnalysisError(f"{self} accesses elements of the unsupported type {element_type}")
        return count, int(element_type[1:]) // 8


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


class DestinationOperands:
    """Registers that an instruction writes."""

    def __init__(self, operands: Sequence[Any], translator: TirTranslator) -> None:
        self._operands = [translator.resolve_registers(operand) for operand in operands]

    def write(self, mask: Mask, lanes: Lanes, columns: NDArray[Any], *, depends_on_memory: bool = True) -> None:
        """Write unsigned integers of shape (lanes, registers), zero-extended to the width of the registers."""
        for column, (registers, index) in enumerate(self._operands):
            register_index = require_uniform(index(mask), lanes)
            bits = columns[:, column]
            all_lanes = mask is None
            write_bits(registers, register_index, lanes, bits, all_lanes=all_lanes, depends_on_memory=depends_on_memory)

    def mark_written(self, mask: Mask, lanes: Lanes, notify: Callable[[Mask], None] | None = None) -> None:
        """Mark the registers as written with values that depend on memory.

        Args:
            mask: Writing lanes.
            lanes: The same lanes as indices.
            notify: Function that notifies the observer of the load for the lanes of a mask. The compiler drops the load
                if no lane reads the registers, so the notification is deferred until lanes read them.
        """
        deferred = None if notify is None else DeferredLoad(notify, mask)
        for registers, index in self._operands:
            register_index = require_uniform(index(mask), lanes)
            previous = registers.deferred_loads.pop(register_index, None)
            if previous is not None and not previous.has_mask(mask):
                previous.notify_read(None)
            if deferred is not None:
                registers.deferred_loads[register_index] = deferred
            registers.is_written[register_index, slice(None) if mask is None else lanes] = True
            registers.depends_on_memory[register_index] = True


def write_bits(
    registers: RegisterBuffer,
    register_index: int,
    lanes: Lanes,
    bits: NDArray[Any],
    *,
    all_lanes: bool,
    depends_on_memory: bool = True,
) -> None:
    """Write bits to registers of some lanes, or of all; `depends_on_memory` is recorded for the element."""
    data = registers.data
    if not 0 <= register_index < len(data):
        raise ExecutionError(f"out of bounds: element {register_index} of {registers.name}, which has {len(data)}")
    if data.dtype.itemsize < bits.dtype.itemsize:
        raise AnalysisError(f"{bits.dtype.itemsize} bytes do not fit a register of {registers.name}, a {data.dtype}")
    if registers.accumulators is not None:
        written_mask = None if all_lanes else np.isin(np.arange(data.shape[1]), lanes)
        registers.accumulators.check_access(register_index, written_mask)
    row = data.view(f"u{data.dtype.itemsize}")[register_index]
    if all_lanes:
        row[:] = bits
        registers.is_written[register_index] = True
        registers.depends_on_memory[register_index] = depends_on_memory
    else:
        row[lanes] = bits
        registers.is_written[register_index, lanes] = True
        registers.depends_on_memory[register_index] |= depends_on_memory


class SourceOperands:
    """Registers or other values that an instruction reads."""

    def __init__(self, operands: Sequence[Any], translator: TirTranslator) -> None:
        self._codes = [translator.translate_expression(operand) for operand in operands]

    def evaluate(self, mask: Mask) -> None:
        """Evaluate the operands without using their values, to notify of deferred loads."""
        for code in self._codes:
            code(mask)

    def read(self, mask: Mask, lanes: Lanes, itemsize: int) -> NDArray[Any]:
        """Return the bits of the operands, of shape (registers, lanes)."""
        return np.stack([extract_bits(code(mask), lanes, itemsize) for code in self._codes])


def resolve_address(call: PtxCall, value: Any, state: EmulatorState, lanes: Lanes) -> MemoryAddress:
    """Return the memory and the offsets that an address operand refers to in some lanes."""
    if isinstance(value, Pointer):
        if isinstance(value.memory, RegisterBuffer | TensorMapArray):
            raise AnalysisError(f"{call} cannot access {value.name}, which is not in addressable memory")
        if call.state_space == "global" and not isinstance(value.memory, GlobalArray):
            raise ExecutionError(f"{call} accesses {value.name}, which is not in global memory")
        offsets = state.select_lane_values(value.byte_offset, lanes).astype(np.int64)
        return MemoryAddress(value.memory, offsets, value.name)
    if not (call.state_space or "shared").startswith("shared"):
        raise AnalysisError(f"{call} uses an address of unknown memory")
    offsets = state.select_lane_values(value, lanes).astype(np.int64)
    target_blocks = None
    if call.state_space == "shared::cluster":
        window_index, offsets = offsets // CLUSTER_WINDOW_BYTES, offsets % CLUSTER_WINDOW_BYTES
        own_blocks = lanes // state.threads.lanes_per_block
        cluster_size = state.threads.cluster_size
        if int(window_index.max(initial=0)) > cluster_size:
            raise ExecutionError(f"{call} accesses a block outside of the cluster of {cluster_size} blocks")
        peer_blocks = own_blocks - own_blocks % cluster_size + window_index - 1
        target_blocks = np.where(window_index == 0, own_blocks, peer_blocks)
    elif offsets.size and int(offsets.max()) >= CLUSTER_WINDOW_BYTES:
        raise ExecutionError(f"{call} accesses another block's shared memory, which requires shared::cluster")
    name = state.find_buffer_name(int(offsets[0])) if offsets.size else ""
    return MemoryAddress(state.shared, offsets, name, target_blocks)


def translate_no_op(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """Translate an instruction without effect in the emulator, such as a hint."""
    return lambda mask: None
