"""What GPU instructions do, for execution with NumPy: PTX as `T.ptx[...]` writes it, and TVM's own intrinsics for it.

Source, where none is named: PTX ISA, sections "Data Movement and Conversion Instructions", "Warp Level Matrix
Multiply-Accumulate Instructions" and "Parallel Synchronization and Communication Instructions".

Of other files are those by which threads wait for each other (`signals`), and those of the async proxy: TMA's (`tma`)
and the multiplication by warpgroups (`wgmma`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.errors import ExecutionError
from tvmconv.analysis.emulation.instructions import signals, tma, wgmma
from tvmconv.analysis.emulation.instructions.operands import (
    CLUSTER_WINDOW,
    PTX,
    Call,
    Code,
    Destinations,
    Run,
    Sources,
    address_of,
    same,
    write_bits,
)
from tvmconv.analysis.emulation.machine import Compiler, Machine, Mask, Pointer, Statement, Waiting
from tvmconv.analysis.emulation.memory.arrays import Array
from tvmconv.analysis.emulation.memory.registers import Registers
from tvmconv.analysis.emulation.memory.shared import Address, Shared
from tvmconv.analysis.emulation.threads import Lanes
from tvmconv.errors import AnalysisError
from tvmconv.gpu import WARP
from tvmconv.workloads.dtypes import numpy_dtype

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.synchronization.strands import Fork, Wait

_ROW_BYTES = 16  # of a matrix that ldmatrix and stmatrix move


def smallest_access(node: Any) -> int:
    """Bytes of the smallest element of shared memory that a call accesses; 4 if it accesses none."""
    call = Call.of(node)
    if call is not None and call.name in ("st", "st_vec", "ld", "ld_vec") and (call.space or "").startswith("shared"):
        return min(4, call.width[1])
    if call is not None and call.name in ("ldmatrix", "stmatrix") and "trans" in call.modifiers:
        return 2
    if str(node.op.name) in ("tirx.ptx_legacy.ldmatrix",) and int(node.args[0]):
        return 2
    return 4


def statement(node: Any, compiler: Compiler) -> Statement | None:
    """What executes a call that stands for itself; None if it is not known here."""
    machine = compiler.machine
    found = signals.helper(node, compiler)
    if found is not None:
        return found
    name = str(node.op.name)
    if name in _LEGACY:
        return _LEGACY[name](node, compiler)
    call = Call.of(node)
    if call is None:
        return None
    known = _INSTRUCTIONS.get(call.name)
    if known is None:
        raise AnalysisError(f"{call}, which cannot be executed")
    run = known(call, compiler)
    if call.predicate is None:
        return run
    predicate = compiler.code(call.predicate)

    def inside(mask: Mask) -> Mask:
        holds = np.broadcast_to(np.asarray(machine.decided(predicate, mask)) != 0, machine.all_lanes.shape)
        return holds & machine.real if mask is None else holds & mask

    if isinstance(run, Waiting):
        waits = run.run

        def waiting(mask: Mask) -> Iterator[Wait | Fork]:
            taking = inside(mask)
            if taking is not None and taking.any():
                yield from waits(taking)

        return Waiting(waiting)
    plain = run

    def predicated(mask: Mask) -> None:
        taking = inside(mask)
        if taking is not None and taking.any():
            plain(taking)

    return predicated


def expression(node: Any, compiler: Compiler) -> Code | None:
    """What evaluates a call that has a value; None if it is not known here."""
    name = str(node.op.name)
    if name == "tirx.cuda.cvta_generic_to_shared":
        pointer = compiler.code(node.args[0])

        def address(mask: Mask) -> Any:
            found = pointer(mask)
            if not isinstance(found, Pointer) or not isinstance(found.memory, Shared):
                raise ExecutionError("the shared address of what does not lie in shared memory")
            return found.offset

        return address
    if name == f"{PTX}addr":
        base, offset = compiler.code(node.args[0]), compiler.code(node.args[1])

        def moved(mask: Mask) -> Any:
            found, by = base(mask), offset(mask)
            return Pointer(found.memory, found.offset + by, found.name) if isinstance(found, Pointer) else found + by

        return moved
    if name == "tirx.cuda.elect_sync":
        return _elect(compiler.machine)
    if name.startswith("tirx.cuda.__shfl"):
        return _shuffle(node, compiler)
    return None


# --- moves ---


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
    if call.space == "shared::cluster":
        raise AnalysisError(f"{call}, which cannot be executed")

    def store(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        where = address_of(call, machine.decided(address, mask), machine, lanes)
        told = where.memory.dtype.itemsize if isinstance(where.memory, Array) else itemsize
        if not machine.checked:
            sources.touch(mask)
            return machine.reach(where.memory, "store", where.name, lanes, where.at, count * itemsize, told)
        rows = np.ascontiguousarray(sources.read(mask, lanes, itemsize).T).view(np.uint8)
        machine.store_bytes(where.memory, where.at, rows, lanes, where.name, told)

    return store


def _start_copy(
    machine: Machine, to: Address, source: Address, nbytes: int, lengths: NDArray[np.int64], lanes: Lanes
) -> None:
    """Start asynchronous copies: so many bytes of each lane, the rest of `nbytes` zeros."""
    if not isinstance(to.memory, Shared) or not isinstance(source.memory, Array):
        raise ExecutionError("an asynchronous copy from other than global to shared memory")
    array = source.memory
    if ((lengths < 0) | (lengths > nbytes)).any():
        raise ExecutionError(f"an asynchronous copy of {nbytes} bytes that reads another number of them")
    units = to.memory.at(to.at, lanes, nbytes)
    if machine.checked:
        data = _copied(array, source.at, nbytes, lengths)
        to.memory.copy(units, lanes, data.view(f"u{to.memory.unit}"))
    reading = lengths > 0
    itemsize = array.dtype.itemsize
    machine.tell("shared", "store", to.name, lanes, to.at, nbytes, itemsize, np.where(reading, source.at, -1))
    machine.tell("global", "load", source.name, lanes[reading], source.at[reading], nbytes, itemsize)


def _copied(array: Array, at: NDArray[np.int64], nbytes: int, lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """What copies of so many bytes write, of which they read but the first `lengths`."""
    data = np.zeros((len(at), nbytes), np.uint8)
    whole = lengths == nbytes
    if whole.any():
        data[whole] = array.read(at[whole], nbytes)
    for i in np.flatnonzero(~whole & (lengths > 0)):
        first, length = int(at[i]), int(lengths[i])
        if first < 0 or first + length > array.nbytes:
            raise ExecutionError(f"out of bounds: {length} bytes at byte {first} of {array.name}")
        data[i, :length] = array.raw[first : first + length]
    return data


def _async_copy(call: Call, compiler: Compiler) -> Run:
    operands = call.operands
    if "L2::cache_hint" in call.modifiers:
        operands = operands[:-1]
    to, source = compiler.code(operands[0]), compiler.code(operands[1])
    nbytes = int(operands[2])
    given = compiler.code(operands[3]) if len(operands) > 3 else None
    ignores = call.name.endswith("ignore_src")
    machine = compiler.machine
    plain = Call(call.name, (), None, ("shared",))

    def copy(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        lengths = np.full(len(lanes), nbytes)
        if given is not None:
            lengths = machine.rows(machine.decided(given, mask), lanes).astype(np.int64)
            lengths = np.where(lengths != 0, 0, nbytes) if ignores else lengths
        pointer = machine.decided(source, mask)
        if not isinstance(pointer, Pointer) or not isinstance(pointer.memory, Array):
            raise ExecutionError(f"{call} from what is not an array")
        _start_copy(
            machine,
            address_of(plain, machine.decided(to, mask), machine, lanes),
            Address(pointer.memory, machine.rows(pointer.offset, lanes).astype(np.int64), pointer.name),
            nbytes,
            lengths,
            lanes,
        )

    return copy


def _commit(call: Call, compiler: Compiler) -> Run:
    machine = compiler.machine
    return lambda mask: machine.shared.commit(machine.lanes(mask))


def _wait(call: Call, compiler: Compiler) -> Run:
    machine, pending = compiler.machine, int(call.operands[0])
    return lambda mask: machine.shared.wait(machine.lanes(mask), pending)


def _wait_all(call: Call, compiler: Compiler) -> Run:
    machine = compiler.machine

    def wait(mask: Mask) -> None:
        machine.shared.commit(machine.lanes(mask))
        machine.shared.wait(machine.lanes(mask), 0)

    return wait


# --- matrices ---


def _matrix_rows(machine: Machine, at: NDArray[np.int64], lanes: Lanes, number: int) -> tuple[Any, Any]:
    """The rows that ldmatrix and stmatrix move: their addresses by (warp, matrix, row), and who gives them.

    The address of row j of matrix i is what lane 8 i + j of the warp gives.
    """
    giving = lanes.reshape(-1, WARP)[:, : 8 * number]
    return at.reshape(-1, WARP)[:, : 8 * number].reshape(-1, number, 8), giving.reshape(-1)


def _load_matrix(
    machine: Machine, name: str, at: NDArray[np.int64], lanes: Lanes, number: int, *, transposed: bool
) -> NDArray[np.uint32]:
    """What each lane gets of 8 × 8 matrices of 16-bit elements, shape (lanes, matrices).

    Lane l gets of row l / 4 the elements 2 (l % 4) and the next; transposed, of column l / 4.
    """
    rows, giving = _matrix_rows(machine, at, lanes, number)
    shared = machine.shared
    shared.at(rows.reshape(-1), giving, _ROW_BYTES)  # in bounds and aligned, each row as a whole
    machine.tell("shared", "load", name, giving, rows.reshape(-1), _ROW_BYTES, 2)
    if not machine.checked:
        return np.zeros((len(lanes), number), np.uint32)
    lane = np.arange(WARP)
    owners = lanes.reshape(-1, WARP)[:, None, :]
    if transposed:
        halves = []
        for h in range(2):
            addresses = rows[:, :, 2 * (lane % 4) + h] + lane // 4 * 2
            units = shared.at(addresses.reshape(-1), np.broadcast_to(owners, addresses.shape).reshape(-1), 2)
            found = shared.read(units, np.broadcast_to(owners, addresses.shape).reshape(-1), whole_warp=True)
            halves.append(found.reshape(addresses.shape).astype(np.uint32))
        words = halves[0] | halves[1] << np.uint32(16)
    else:
        addresses = rows[:, :, lane // 4] + lane % 4 * 4
        who = np.broadcast_to(owners, addresses.shape).reshape(-1)
        units = shared.at(addresses.reshape(-1), who, 4)
        found = np.ascontiguousarray(shared.read(units, who, whole_warp=True))
        words = found.view(np.uint32).reshape(addresses.shape)
    return np.ascontiguousarray(words.transpose(0, 2, 1).reshape(len(lanes), number))


def _ldmatrix(call: Call, compiler: Compiler) -> Run:
    number = int(call.modifiers[3][1:])
    destinations = Destinations(call.operands[:number], compiler)
    address, machine = compiler.code(call.operands[number]), compiler.machine
    transposed = "trans" in call.modifiers

    def load(mask: Mask) -> None:
        lanes = machine.warps(mask)
        where = address_of(call, machine.decided(address, mask), machine, lanes)

        def matrices() -> NDArray[np.uint32]:
            return _load_matrix(machine, where.name, where.at, lanes, number, transposed=transposed)

        if not machine.checked:
            return destinations.mark(mask, lanes, machine.later(lambda reading: matrices()))
        found = matrices()
        destinations.write(mask, lanes, found)

    return load


def _stmatrix(call: Call, compiler: Compiler) -> Run:
    number = int(call.modifiers[3][1:])
    address, machine = compiler.code(call.operands[0]), compiler.machine
    sources = Sources(call.operands[1 : 1 + number], compiler)
    transposed = "trans" in call.modifiers

    def store(mask: Mask) -> None:
        lanes = machine.warps(mask)
        where = address_of(call, machine.decided(address, mask), machine, lanes)
        rows, giving = _matrix_rows(machine, where.at, lanes, number)
        shared = machine.shared
        shared.at(rows.reshape(-1), giving, _ROW_BYTES)
        machine.tell("shared", "store", where.name, giving, rows.reshape(-1), _ROW_BYTES, 2)
        if not machine.checked:
            return sources.touch(mask)
        words = sources.read(mask, lanes, 4).reshape(number, -1, WARP).transpose(1, 0, 2)
        lane = np.arange(WARP)
        owners = np.broadcast_to(lanes.reshape(-1, WARP)[:, None, :], words.shape).reshape(-1)
        if transposed:
            for h in range(2):
                addresses = rows[:, :, 2 * (lane % 4) + h] + lane // 4 * 2
                half = (words >> np.uint32(16 * h)).astype(np.uint16)
                shared.write(shared.at(addresses.reshape(-1), owners, 2), owners, half.reshape(-1, 1))
        else:
            addresses = rows[:, :, lane // 4] + lane % 4 * 4
            given = np.ascontiguousarray(words.reshape(-1, 1)).view(f"u{shared.unit}")
            shared.write(shared.at(addresses.reshape(-1), owners, 4), owners, given)

    return store


@dataclass(frozen=True)
class _Shape:
    """An mma instruction: D = A · B + C by one warp.

    Attributes:
        k: the length of a sum; m is 16 and n is 8.
        dtype: of the operands, as they are multiplied.
        packed: how many of these are in a register.
    """

    k: int
    dtype: str
    packed: int

    @property
    def a(self) -> int:
        """Registers of A that a lane has."""
        return 16 * self.k // WARP // self.packed

    @property
    def b(self) -> int:
        """Registers of B that a lane has."""
        return self.k * 8 // WARP // self.packed


_OPERANDS = {"f16": ("float16", 2), "bf16": ("bfloat16", 2), "tf32": ("float32", 1)}
_SHAPES = {
    ("m16n8k16", "f16"),
    ("m16n8k8", "f16"),
    ("m16n8k16", "bf16"),
    ("m16n8k8", "bf16"),
    ("m16n8k8", "tf32"),
    ("m16n8k4", "tf32"),
}


def _shape(text: str, kinds: set[str], what: str) -> _Shape:
    if len(kinds) != 1 or (text, *kinds) not in _SHAPES:
        raise AnalysisError(f"{what}, which cannot be executed")
    return _Shape(int(text.rpartition("k")[2]), *_OPERANDS[kinds.pop()])


def _elements(shape: _Shape, bits: NDArray[Any]) -> NDArray[np.float32]:
    """The elements in registers, of shape (registers × packed, lanes), as they are multiplied."""
    if shape.packed == 1:  # of float32 the tensor cores read 10 bits of mantissa, and no more
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    halves = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], axis=1).astype(np.uint16)
    return halves.reshape(-1, bits.shape[1]).view(numpy_dtype(shape.dtype)).astype(np.float32)


def _multiply(
    shape: _Shape, a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]
) -> NDArray[np.float32]:
    """D of elements as lanes have them, each of shape (elements, lanes); sums in float32.

    With g = lane / 4 and t = lane % 4, a lane has of A the rows g and g + 8, of B the column g, of C and D the columns
    2 t and 2 t + 1 of these rows; along k the elements `packed` · t and on, and those half a step of 8 registers later.
    """
    p, half = shape.packed, shape.k // (4 * shape.packed)  # halves of k
    a = a.reshape(half, 2, p, -1, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(-1, 16, shape.k)
    b = b.reshape(half, p, -1, 8, 4).transpose(2, 0, 4, 1, 3).reshape(-1, shape.k, 8)
    c = c.reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
    d = np.matmul(a, b) + c
    return d.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)


def _told_mma(machine: Machine, shape: _Shape, lanes: Lanes) -> None:
    if machine.watch is not None:
        for name in ("Mul", "Add"):
            machine.watch.operation(name, lanes, 16 * 8 * shape.k // WARP, 4)


def _mma(call: Call, compiler: Compiler) -> Run:
    size, rows, columns, *kinds = call.modifiers[2:]
    if (rows, columns) != ("row", "col") or len(kinds) != 4 or kinds[0] != "f32" or kinds[3] != "f32":
        raise AnalysisError(f"{call}, which cannot be executed")
    shape = _shape(size, set(kinds[1:3]), str(call))
    ends = np.cumsum([4, shape.a, shape.b, 4])
    d, a, b, c = (call.operands[end - n : end] for n, end in zip((4, shape.a, shape.b, 4), ends, strict=True))
    destinations = Destinations(d, compiler)
    left, right, sums = (Sources(each, compiler) for each in (a, b, c))
    machine = compiler.machine

    def multiply(mask: Mask) -> None:
        lanes = machine.warps(mask)
        _told_mma(machine, shape, lanes)
        if not machine.checked:
            for operand in (left, right, sums):
                operand.touch(mask)
            return destinations.mark(mask, lanes)
        found = _multiply(
            shape,
            _elements(shape, left.read(mask, lanes, 4)),
            _elements(shape, right.read(mask, lanes, 4)),
            sums.read(mask, lanes, 4).view(np.float32),
        )
        destinations.write(mask, lanes, np.ascontiguousarray(found).view(np.uint32).T)

    return multiply


# --- arithmetic of PTX ---


def _convert_two(call: Call, compiler: Compiler) -> Run:
    """cvt.rn{.relu}.{f16x2,bf16x2}.f32 d, a, b: a goes to the upper half of d, b to the lower."""
    if set(call.modifiers) - {"rn", "relu", "f16x2", "bf16x2", "f32"}:
        raise AnalysisError(f"{call}, which cannot be executed")
    kind = numpy_dtype("float16" if "f16x2" in call.modifiers else "bfloat16")
    destinations, sources = Destinations(call.operands[:1], compiler), Sources(call.operands[1:3], compiler)
    machine = compiler.machine

    def convert(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        if not machine.checked:
            sources.touch(mask)
            return destinations.mark(mask, lanes)
        exact = sources.read(mask, lanes, 4).view(np.float32)
        rounded = (np.maximum(exact, 0) if "relu" in call.modifiers else exact).astype(kind)
        upper, lower = rounded.view(np.uint16).astype(np.uint32)
        destinations.write(mask, lanes, (upper << np.uint32(16) | lower)[:, None])

    return convert


def to_tf32(bits: NDArray[np.uint32], rounding: str) -> NDArray[np.uint32]:
    """The bits of float32, rounded to TF32: `rna` to the nearest, ties away from zero, `rn` ties to even, `rz` cut."""
    cut = np.uint32(0xFFFFE000)
    if rounding == "rz":
        return bits & cut
    add = np.uint32(0x1000) if rounding == "rna" else np.uint32(0x0FFF) + (bits >> np.uint32(13) & np.uint32(1))
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)  # infinite or no number
    return np.where(special, bits, (bits + add) & cut)


def _convert_tf32(call: Call, compiler: Compiler) -> Run:
    rounding, *others = call.modifiers
    if others != ["tf32", "f32"]:
        raise AnalysisError(f"{call}, which cannot be executed")
    destinations, sources = Destinations(call.operands[:1], compiler), Sources(call.operands[1:2], compiler)
    machine = compiler.machine

    def convert(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        destinations.write(mask, lanes, to_tf32(sources.read(mask, lanes, 4), rounding).T)

    return convert


_SCALARS = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


def _convert(call: Call, compiler: Compiler) -> Run:
    """Conversion between floating-point types of one element, rounded to the nearest."""
    kinds = [each for each in call.modifiers if each != "rn"]
    if len(kinds) != 2 or not set(kinds) <= set(_SCALARS):
        raise AnalysisError(f"{call}, which cannot be executed")
    to, source = (numpy_dtype(_SCALARS[each]) for each in kinds)
    destinations, sources = Destinations(call.operands[:1], compiler), Sources(call.operands[1:2], compiler)
    machine = compiler.machine

    def convert(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        (bits,) = sources.read(mask, lanes, source.itemsize)
        destinations.write(mask, lanes, bits.view(source).astype(to).view(f"u{to.itemsize}")[:, None])

    return convert


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


# --- shuffles ---


def _elect(machine: Machine) -> Code:
    """elect.sync: 1 in the first lane of each warp that takes part, and 0 in the others."""

    def elect(mask: Mask) -> NDArray[np.int64]:
        taking = machine.real if mask is None else mask
        first = taking.reshape(-1, WARP).argmax(axis=1) + np.arange(0, len(taking), WARP)
        elected = np.zeros(len(taking), np.int64)
        elected[first] = 1
        return elected * taking

    return elect


def _elect_sync(call: Call, compiler: Compiler) -> Run:
    """elect.sync lane|elected, mask: the mask is taken to be the lanes that are there."""
    destinations, machine = Destinations(call.operands[:2], compiler), compiler.machine
    elect = _elect(machine)

    def run(mask: Mask) -> None:
        lanes, elected = machine.lanes(mask), np.asarray(elect(mask))
        by_warp = elected.reshape(-1, WARP)
        leader = np.repeat(by_warp.argmax(axis=1), WARP)
        columns = np.stack([leader[lanes], elected[lanes]], axis=1).astype(np.uint8)
        destinations.write(mask, lanes, columns, loaded=False)

    return run


def _exchange(machine: Machine, value: Any, mode: str, by: Any, width: int, lanes: Lanes) -> NDArray[Any]:
    """What each lane gets of the others' values; from a lane that takes no part, poison."""
    everyone = machine.all_lanes
    values = np.broadcast_to(np.asarray(value), everyone.shape)
    by = np.broadcast_to(np.asarray(by), everyone.shape).astype(np.int64)
    lane = everyone % WARP
    segment = lane // width * width
    target = {"": segment + by % width, "_up": lane - by, "_down": lane + by, "_xor": lane ^ by}[mode]
    outside = (target < segment) | (target >= segment + width)
    source = everyone - lane + np.where(outside, lane, target)
    taking = np.zeros(len(everyone), bool)
    taking[lanes] = True
    found = values[source].copy()
    missing = ~taking[source] & taking
    if missing.any():
        if found.dtype.kind in "iub":
            raise ExecutionError("a shuffle from a lane that takes no part")
        found[missing] = np.nan
    return found


def _shuffle(node: Any, compiler: Compiler) -> Code:
    """`__shfl_sync`, `__shfl_up_sync`, `__shfl_down_sync` and `__shfl_xor_sync`."""
    mode = str(node.op.name).removeprefix("tirx.cuda.__shfl").removesuffix("sync").removesuffix("_")
    value, by = compiler.code(node.args[1]), compiler.code(node.args[2])
    width = int(node.args[3]) if len(node.args) > 3 else WARP
    machine = compiler.machine
    itemsize = node.ty.dtype.itemsize

    def shuffle(mask: Mask) -> Any:
        lanes = machine.lanes(mask)
        found = _exchange(machine, value(mask), mode, by(mask), width, lanes)
        if machine.watch is not None:
            machine.watch.operation("shuffle", lanes, 1, itemsize)
        return found

    return shuffle


# --- TVM's own intrinsics ---


def _own_async_copy(node: Any, compiler: Compiler) -> Run:
    """Of (destination, offset, source, offset, bytes, whether to load and not to store zeros).

    Where it does not load, TVM's code stores zeros at once; they are taken to land with the copies.
    """
    to, to_at, source, source_at, size, *when = node.args
    nbytes = int(size)
    codes = [compiler.code(each) for each in (to, to_at, source, source_at)]
    condition = compiler.code(when[0]) if when else None
    itemsize = node.ty.dtype.itemsize
    machine = compiler.machine

    def copy(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        target, first, pointer, second = (machine.decided(code, mask) for code in codes)
        lengths = np.full(len(lanes), nbytes)
        if condition is not None:
            lengths = np.where(machine.rows(machine.decided(condition, mask), lanes), nbytes, 0)
        _start_copy(
            machine,
            Address(target.memory, machine.rows(target.offset + first * itemsize, lanes), target.name),
            Address(pointer.memory, machine.rows(pointer.offset + second * itemsize, lanes), pointer.name),
            nbytes,
            lengths,
            lanes,
        )

    return copy


def _own_registers(node: Any, compiler: Compiler) -> Registers:
    pointer = compiler.code(node)(None)
    if not isinstance(pointer, Pointer) or not isinstance(pointer.memory, Registers):
        raise AnalysisError(f"an operand that is no registers: {node}")
    return pointer.memory


def _own_fill(node: Any, compiler: Compiler) -> Run:
    """Of (how many, registers, offset): zeros."""
    count, registers = int(node.args[0]), _own_registers(node.args[1], compiler)
    offset, machine = compiler.code(node.args[2]), compiler.machine

    def fill(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        first = same(offset(mask), lanes)
        for i in range(count):
            zeros = np.zeros(len(lanes), f"u{registers.data.dtype.itemsize}")
            write_bits(registers, first + i, lanes, zeros, whole=mask is None)

    return fill


def _own_ldmatrix(node: Any, compiler: Compiler) -> Run:
    """Of (transposed, how many, type, registers, offset, address, offset in elements)."""
    transposed, number, kind = bool(node.args[0]), int(node.args[1]), str(node.args[2].value)
    registers = _own_registers(node.args[3], compiler)
    first, address, offset = (compiler.code(each) for each in node.args[4:7])
    itemsize, machine = node.ty.dtype.itemsize, compiler.machine
    if kind != ".b16":
        raise AnalysisError(f"ldmatrix of {kind}")
    each = 4 // registers.data.dtype.itemsize  # elements of a register of 32 bits

    def load(mask: Mask) -> None:
        lanes = machine.warps(mask)
        pointer, by = machine.decided(address, mask), machine.decided(offset, mask)
        start = same(first(mask), lanes)
        at = machine.rows(pointer.offset + by * itemsize, lanes)
        words = _load_matrix(machine, pointer.name, at, lanes, number, transposed=transposed)
        elements = words.view(f"u{registers.data.dtype.itemsize}").reshape(len(lanes), number * each)
        for i in range(number * each):
            write_bits(registers, start + i, lanes, elements[:, i], whole=mask is None)

    return load


def _own_elements(shape: _Shape, registers: Registers, first: int, count: int, lanes: Lanes) -> NDArray[np.float32]:
    """So many 32-bit registers, as they are multiplied."""
    each = 4 // registers.data.dtype.itemsize
    if not 0 <= first <= len(registers.data) - count * each:
        raise ExecutionError(f"out of bounds: element {first} of {registers.name}, which has {len(registers.data)}")
    data = registers.data[first : first + count * each, lanes]
    if each == 2:
        return data.view(numpy_dtype(shape.dtype)).astype(np.float32)
    return _elements(shape, data.view(np.uint32))


def _own_mma(node: Any, compiler: Compiler) -> Run:
    """Of (shape, layouts, types of A, B and C, and registers and offset of A, B and C, which is D as well)."""
    size, rows, columns, *kinds = (str(each.value) for each in node.args[:6])
    names = {"fp16": "f16", "bf16": "bf16", "tf32": "tf32"}
    what = f"mma {size} of {', '.join(kinds)}"
    if (rows, columns, kinds[2]) != ("row", "col", "fp32"):
        raise AnalysisError(f"{what}, which cannot be executed")
    shape = _shape(size, {names.get(kind, kind) for kind in kinds[:2]}, what)
    a, b, c = (_own_registers(node.args[i], compiler) for i in (6, 8, 10))
    offsets = [compiler.code(node.args[i]) for i in (7, 9, 11)]
    machine = compiler.machine

    def multiply(mask: Mask) -> None:
        lanes = machine.warps(mask)
        at, bt, ct = (same(code(mask), lanes) for code in offsets)
        _told_mma(machine, shape, lanes)
        if not machine.checked:
            for i in range(4):
                write_bits(c, ct + i, lanes, np.zeros(len(lanes), np.uint32), whole=mask is None)
            return
        found = _multiply(
            shape,
            _own_elements(shape, a, at, shape.a, lanes),
            _own_elements(shape, b, bt, shape.b, lanes),
            c.data[ct : ct + 4, lanes],
        )
        for i in range(4):
            bits = np.ascontiguousarray(found[i]).view(np.uint32)
            write_bits(c, ct + i, lanes, bits, whole=mask is None)

    return multiply


_INSTRUCTIONS: dict[str, Callable[[Call, Compiler], Statement]] = {
    **signals.INSTRUCTIONS,
    **tma.INSTRUCTIONS,
    **wgmma.INSTRUCTIONS,
    "ld": _load,
    "ld_vec": _load,
    "st": _store,
    "st_vec": _store,
    "cp_async_commit_group": _commit,
    "cp_async_wait_group": _wait,
    "cp_async_wait_all": _wait_all,
    "ldmatrix": _ldmatrix,
    "stmatrix": _stmatrix,
    "mma": _mma,
    "cvt": _convert,
    "cvt_f16x2_f32": _convert_two,
    "cvt_bf16x2_f32": _convert_two,
    "cvt_tf32_f32": _convert_tf32,
    "mapa_u32": _map_to_peer,
    "elect_sync": _elect_sync,
}
_INSTRUCTIONS |= {
    f"cp_async_{cop}{tail}": _async_copy for cop in ("ca", "cg") for tail in ("", "_src_size", "_ignore_src")
}
_LEGACY: dict[str, Callable[[Any, Compiler], Run]] = {
    "tirx.s_tir.cp_async_raw": _own_async_copy,
    "tirx.mma_fill_legacy": _own_fill,
    "tirx.ptx_legacy.ldmatrix": _own_ldmatrix,
    "tirx.ptx_legacy.mma": _own_mma,
}
