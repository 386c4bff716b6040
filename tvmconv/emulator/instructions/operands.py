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
    def from_node(cls, node: Any) -> PtxCall | None:
        """The call that a node is, if it is one."""
        name = str(node.op.name)
        if not name.startswith(PTX_PREFIX) or name == f"{PTX_PREFIX}addr":
            return None
        strings = [str(argument.value) for argument in node.args if type(argument).__name__ == "StringImm"]
        operands = [argument for argument in node.args if type(argument).__name__ != "StringImm"]
        flags = strings[-1].split(",") if strings else []
        predicate_position = re.compile(r"p\d+")  # of operand so and so, that it is a predicate
        if unknown_flags := {flag for flag in flags if not predicate_position.fullmatch(flag)} - {"", "pred", "keep"}:
            raise AnalysisError(f"PTX {name.removeprefix(PTX_PREFIX)} with {', '.join(sorted(unknown_flags))}")
        predicate = operands.pop() if "pred" in flags else None
        return cls(name.removeprefix(PTX_PREFIX), tuple(operands), predicate, tuple(t for t in strings[:-1] if t))

    def __str__(self) -> str:
        return f"PTX {self.name.partition('_')[0]}.{'.'.join(self.modifiers)}"

    @property
    def state_space(self) -> str | None:
        """The state space that it names."""
        state_spaces = [
            modifier for modifier in self.modifiers if modifier.partition("::")[0] in ("global", "shared", "local")
        ]
        return state_spaces[0] if state_spaces else None

    @property
    def vector_width(self) -> tuple[int, int]:
        """How many elements an access has, and the bytes of one: of `v4.b32`, 4 and 4."""
        count = next((int(modifier[1:]) for modifier in self.modifiers if modifier in ("v2", "v4", "v8")), 1)
        element_type = self.modifiers[-1]
        if not element_type[1:].isdigit() or element_type[0] not in "busf":
            raise AnalysisError(f"{self}: elements of the type {element_type}")
        return count, int(element_type[1:]) // 8


def extract_bits(value: Any, lanes: Lanes, itemsize: int) -> NDArray[Any]:
    """The bits of a value in some lanes, as unsigned integers."""
    values = np.asarray(value)
    values = np.full(len(lanes), values) if values.ndim == 0 else values[lanes]
    if values.dtype.kind in "iub":
        return values.astype(np.int64).astype(f"u{itemsize}")
    if values.dtype.itemsize != itemsize:
        raise AnalysisError(f"a register of {values.dtype} where there are {itemsize} bytes")
    return np.ascontiguousarray(values).view(f"u{itemsize}")


def require_uniform(value: Any, lanes: Lanes) -> int:
    """A number that is the same in all lanes."""
    if isinstance(value, int):
        return value
    values = np.asarray(value)
    values = values if values.ndim == 0 else values[lanes]
    first = int(values.reshape(-1)[0])
    if (values != first).any():
        raise AnalysisError("registers that are chosen by lane")
    return first


class DestinationOperands:
    """Registers that an instruction writes."""

    def __init__(self, operands: Sequence[Any], translator: TirTranslator) -> None:
        self._operands = [translator.resolve_registers(operand) for operand in operands]

    def write(self, mask: Mask, lanes: Lanes, columns: NDArray[Any], *, depends_on_memory: bool = True) -> None:
        """Write unsigned integers of shape (lanes, registers), widened as far as the registers are wider."""
        for column, (registers, index) in enumerate(self._operands):
            write_bits(
                registers,
                require_uniform(index(mask), lanes),
                lanes,
                columns[:, column],
                all_lanes=mask is None,
                depends_on_memory=depends_on_memory,
            )

    def mark_written(self, mask: Mask, lanes: Lanes, notify: Callable[[Mask], None] | None = None) -> None:
        """Note that they are written, with what depends on memory and does not matter.

        Args:
            mask: the lanes.
            lanes: the same.
            notify: tells of the load that they come from, for the lanes of a mask: the compiler drops it if nobody
                reads any of them, and does it where they are read.
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
    """Write bits to registers: with `all_lanes` to those of all lanes; `depends_on_memory` marks the bits."""
    data = registers.data
    if not 0 <= register_index < len(data):
        raise ExecutionError(f"out of bounds: element {register_index} of {registers.name}, which has {len(data)}")
    if data.dtype.itemsize < bits.dtype.itemsize:
        raise AnalysisError(f"{bits.dtype.itemsize} bytes for a register of {registers.name}, which is narrower")
    if registers.accumulators is not None:
        registers.accumulators.check_access(
            register_index, None if all_lanes else np.isin(np.arange(data.shape[1]), lanes)
        )
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
    """Registers, or other values, that an instruction reads."""

    def __init__(self, operands: Sequence[Any], translator: TirTranslator) -> None:
        self._codes = [translator.translate_expression(operand) for operand in operands]

    def evaluate(self, mask: Mask) -> None:
        """Read them where what they are does not matter."""
        for code in self._codes:
            code(mask)

    def read(self, mask: Mask, lanes: Lanes, itemsize: int) -> NDArray[Any]:
        """Their bits, of shape (registers, lanes)."""
        return np.stack([extract_bits(code(mask), lanes, itemsize) for code in self._codes])


def resolve_address(call: PtxCall, value: Any, state: EmulatorState, lanes: Lanes) -> MemoryAddress:
    """Where an operand that is an address points to, in some lanes."""
    if isinstance(value, Pointer):
        if isinstance(value.memory, RegisterBuffer | TensorMapArray):
            raise AnalysisError(f"{call} on {value.name}, which is no memory that it could access")
        if call.state_space == "global" and not isinstance(value.memory, GlobalArray):
            raise ExecutionError(f"{call} on {value.name}, which does not lie in global memory")
        return MemoryAddress(
            value.memory, state.select_lane_values(value.byte_offset, lanes).astype(np.int64), value.name
        )
    if not (call.state_space or "shared").startswith("shared"):
        raise AnalysisError(f"{call} at an address of which it is not known what lies there")
    offsets = state.select_lane_values(value, lanes).astype(np.int64)
    target_blocks = None
    if call.state_space == "shared::cluster":
        window_index, offsets = offsets // CLUSTER_WINDOW_BYTES, offsets % CLUSTER_WINDOW_BYTES
        own_blocks = lanes // state.threads.lanes_per_block
        cluster_size = state.threads.cluster_size
        if int(window_index.max(initial=0)) > cluster_size:
            raise ExecutionError(f"{call}: no such block in the cluster")
        target_blocks = np.where(
            window_index == 0, own_blocks, own_blocks - own_blocks % cluster_size + window_index - 1
        )
    elif offsets.size and int(offsets.max()) >= CLUSTER_WINDOW_BYTES:
        raise ExecutionError(f"{call} at an address of another block: it needs shared::cluster")
    name = state.find_buffer_name(int(offsets[0])) if offsets.size else ""
    return MemoryAddress(state.shared, offsets, name, target_blocks)


def translate_no_op(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """What changes nothing that is executed here: hints, and what orders what is in order."""
    return lambda mask: None
