"""Lowered device functions, executed with NumPy: no GPU, and stricter than one.

All threads of a block, and many blocks at once, run in lock step: a value is a number, or an array of one for each
lane. `execute` runs one device function on arrays and changes them; what no kernel may do raises `ExecutionError`
(tvmconv.analysis.memory): leaving an array, misaligned vectors, races for shared memory, barriers that not all threads
reach, registers read as integers before they are written. Memory that nobody has written is NaN.

The two sides of a branch in which threads wait for each other, at mbarriers or barriers, are executed in turns
(tvmconv.analysis.strands). Where lock step itself keeps threads from going on, all is executed again, by warpgroups,
and then by warps, but for whole warpgroups where they multiply together. That nobody can go on even so is a
`DeadlockError` that tells who waits where, and for what. Tensor maps are given as `Mapped` arrays (`arguments`).

What TMA copies lands when nobody can go on without it, in the order in which it was asked for; what wgmma computes is
in its registers at once. Found are, as a `RaceError`: an access to where a copy goes without a wait for its mbarrier;
bytes that an mbarrier expects but do not come (a deadlock), or too few (its phase is complete before they are there);
mbarriers that are used before they are made known, by a barrier and fence.mbarrier_init; shared memory that is written
while wgmma or a bulk store may still read it, as nobody has waited, or nobody was told; what threads have stored and
TMA or wgmma reads with no fence.proxy.async behind it; accumulators that are accessed with no wgmma.wait_group, or
multiplied into with no wgmma.fence; blocks that end while others access their memory, or copies are under way.

Floating-point arithmetic is that of the types: NumPy's, rounded after every operation; wgmma adds up exact products in
float32. A minimum or maximum of a NaN is NaN, other than on a GPU, so that what was not written shows behind an
activation too.

Not executed: textures, atomics, wgmma with operands in registers or not K-major, bulk copies without a tensor map,
gathers and scatters, reductions by TMA. `mbarrier.try_wait` waits for as long as it takes; setmaxnreg, griddepcontrol
and prefetches do nothing. Not found: races for global memory; accumulators of different shapes under way at a time;
threads that wait for each other within a warp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis import instructions
from tvmconv.analysis.machine import Machine, Mask, Pointer, Recorder, Statement, Waiting, Watch
from tvmconv.analysis.memory import SHARED_BASE, Array, ExecutionError, Mapped, Registers, Shared
from tvmconv.analysis.strands import DeadlockError, Fork, Steps, Turn, run
from tvmconv.analysis.threads import Threads
from tvmconv.errors import AnalysisError
from tvmconv.gpu import WARP, WARPGROUP
from tvmconv.workloads.dtypes import numpy_dtype

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

    from tvmconv.compiler.lower import LoweredStep
    from tvmconv.compiler.program import Launch

BLOCKS = 8  # that stand for all
MAX_LANES = 1 << 15  # that are executed together
MAX_SHARED_BYTES = 1 << 26  # of all of them

Block = tuple[int, int, int]  # its place in the grid, or the grid, as (x, y, z)
Value = Any  # a number, an array of one for each lane, or of shape (lanes, elements of a vector); or a Pointer
Code = Callable[[Mask], Value]
Argument = Array | Mapped  # what a parameter is given


def execute(
    function: PrimFunc,
    launch: Launch,
    arrays: Sequence[Argument],
    *,
    blocks: Sequence[Block] | None = None,
    watch: Watch | None = None,
) -> None:
    """Run a lowered device function on arrays, which it changes.

    Args:
        function: the device function.
        launch: its grid, block and cluster.
        arrays: what its parameters point to, or are tensor maps of: see `arguments`.
        blocks: which blocks of the grid to run, as (x, y, z), with the others of their clusters; all by default.
        watch: is told of what happens.

    Raises:
        ExecutionError: the function does what no kernel may.
        AnalysisError: it has something that cannot be executed.
    """
    blocks = with_clusters(launch, blocks)
    cluster = math.prod(launch.cluster)
    layout = shared_layout(function)
    lanes = -(-launch.threads // WARP) * WARP
    fitting = min(MAX_LANES // lanes, MAX_SHARED_BYTES // max(1, layout.nbytes))
    step = max(1, fitting // cluster) * cluster
    for start in range(0, len(blocks), step):
        threads = Threads(launch.block, np.array(blocks[start : start + step], np.int64), launch.cluster)
        _execute(function, threads, layout, arrays, watch)


def arguments(step: LoweredStep, arrays: Sequence[Array]) -> list[Argument]:
    """What a step's parameters are given, of arrays in the order of `LoweredStep.arguments`' indices."""
    maps = dict(step.tensor_maps)
    return [Mapped(arrays[i], maps[at]) if at in maps else arrays[i] for at, i in enumerate(step.arguments)]


def _execute(
    function: PrimFunc, threads: Threads, layout: Layout, arrays: Sequence[Argument], watch: Watch | None
) -> None:
    """Run blocks together: in lock step as far as they can, and by warpgroup or warp where they wait for each other."""
    given = [each.array if isinstance(each, Mapped) else each for each in arrays]
    before = [array.raw.copy() for array in given] if _waits(function) else []
    together = any("wgmma" in name for name in _calls(function))
    for size in (None, WARPGROUP, WARP) if before else (None,):
        recorded = Recorder() if watch is not None and before else watch
        machine = Machine(threads, Shared(threads, layout.nbytes, layout.unit), recorded)
        program = _Compiler(machine, layout, dict(zip(function.params, arrays, strict=True)))
        code = program.statement(function.body)
        if recorded is not None:
            recorded.begin(threads)
        try:
            with np.errstate(all="ignore"):
                program.run(code, size, together)
        except DeadlockError:
            if not before or size == WARP:
                raise
            for array, raw in zip(given, before, strict=True):
                array.raw[:] = raw
            continue
        machine.mbarriers.leave()
        machine.shared.end()
        if isinstance(recorded, Recorder) and watch is not None:
            recorded.replay(watch)
        return


def with_clusters(launch: Launch, blocks: Sequence[Block] | None = None) -> list[Block]:
    """Blocks, all by default, and the others of their clusters: those of one in a row, in the order of their ranks."""
    x, y, z = (range(0, extent, step) for extent, step in zip(launch.grid, launch.cluster, strict=True))
    if any(extent % step for extent, step in zip(launch.grid, launch.cluster, strict=True)):
        raise AnalysisError(f"a grid of {launch.grid} blocks in clusters of {launch.cluster}")
    if blocks is None:
        blocks = [(i, j, k) for k in z for j in y for i in x]
    firsts = dict.fromkeys(tuple(at - at % step for at, step in zip(b, launch.cluster, strict=True)) for b in blocks)
    cx, cy, cz = launch.cluster
    return [(i + dx, j + dy, k + dz) for i, j, k in firsts for dz in range(cz) for dy in range(cy) for dx in range(cx)]


def some_blocks(grid: Block) -> list[Block]:
    """Blocks spread over a grid: the one in the middle, and some drawn at random, always the same.

    The middle alone will not do: where a schedule has fused the grid's axes, it may lie at an image's border.
    """
    drawn = np.random.default_rng(0).integers(grid, size=(BLOCKS - 1, 3)).tolist()
    x, y, z = (extent // 2 for extent in grid)
    return list(dict.fromkeys([(x, y, z), *((x, y, z) for x, y, z in drawn)]))


def zeros(step: LoweredStep) -> list[Argument]:
    """Arrays of zeros for a step's parameters, as large as its text and its tensor maps have them."""
    import tvm_ffi
    from tvm import tirx

    sizes: dict[Any, int] = {}

    def declare(node: Any) -> None:
        sizes[node.data] = max(sizes.get(node.data, 0), math.prod(int(extent) for extent in node.buffer.shape))

    tvm_ffi.structural_walk(step.function.body, (tirx.DeclBuffer, declare), order="post")
    maps = dict(step.tensor_maps)
    arrays: dict[int, Array] = {}
    for at, (parameter, variable) in enumerate(zip(step.parameters, step.function.params, strict=True)):
        dtype = numpy_dtype(parameter.dtype)
        size = -(-maps[at].nbytes // dtype.itemsize) if at in maps else sizes.get(variable, 0)
        if parameter.index not in arrays or arrays[parameter.index].size < size:
            arrays[parameter.index] = Array.zeros(parameter.name, dtype, size)
    given = [arrays[i] for i in step.arguments]
    return [Mapped(array, maps[at]) if at in maps else array for at, array in enumerate(given)]


def _calls(function: PrimFunc) -> set[str]:
    """The names of all operators that a function calls."""
    import tvm_ffi
    from tvm.ir import Call

    names: set[str] = set()
    tvm_ffi.structural_walk(function.body, (Call, lambda call: names.add(str(call.op.name))), order="post")
    return names


def _waits(function: PrimFunc) -> bool:
    """Whether parts of a block may wait for each other."""
    return any("mbarrier" in name or "bar_" in name or "cluster" in name for name in _calls(function))


@dataclass(frozen=True)
class Layout:
    """Where the shared buffers of a function lie.

    Attributes:
        offsets: of each buffer that is allocated, in bytes behind the first.
        nbytes: of all.
        unit: bytes of the smallest element that is accessed.
    """

    offsets: Mapping[Any, int]
    nbytes: int
    unit: int


def shared_layout(function: PrimFunc) -> Layout:
    """Where the shared buffers of a function lie, one behind the other; each begins at a multiple of 1,024 bytes."""
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import Call

    offsets: dict[Any, int] = {}
    sizes = [4]
    end = 0

    def allocate(node: Any) -> None:
        nonlocal end
        if str(node.buffer.scope()).startswith("shared"):
            offsets[node.buffer] = end
            nbytes = math.prod(int(n) for n in node.buffer.shape) * numpy_dtype(str(node.buffer.dtype)).itemsize
            end = -(-(end + nbytes) // SHARED_BASE) * SHARED_BASE
            layout_end.append(offsets[node.buffer] + nbytes)
            if str(node.buffer.dtype) != "uint8":
                sizes.append(numpy_dtype(str(node.buffer.dtype)).itemsize)

    layout_end = [0]
    tvm_ffi.structural_walk(function.body, (tirx.AllocBuffer, allocate), order="post")

    def declare(node: Any) -> None:
        if str(node.buffer.scope()).startswith("shared"):
            sizes.append(numpy_dtype(str(node.buffer.dtype)).itemsize)

    tvm_ffi.structural_walk(function.body, (tirx.DeclBuffer, declare), order="post")

    def call(node: Any) -> None:
        sizes.append(instructions.smallest_access(node))

    tvm_ffi.structural_walk(function.body, (Call, call), order="post")
    unit = min(sizes)
    if unit < 2:
        raise AnalysisError("shared accesses of single bytes")
    return Layout(offsets, layout_end[-1], unit)


def _uniform(value: Value) -> bool:
    return not isinstance(value, np.ndarray) or value.ndim == 0


def _as_uint64(value: Value) -> Value:
    """Integers as unsigned ones of 64 bits, which the others' type does not hold."""
    return value.astype(np.uint64) if isinstance(value, np.ndarray | np.generic) else int(value) & 0xFFFF_FFFF_FFFF_FFFF


def _integers(dtype: np.dtype[Any]) -> type[np.int64] | type[np.uint64]:
    """As what integers of a type are computed with."""
    return np.uint64 if dtype == np.uint64 else np.int64


def _trunc_div(a: Value, b: Value) -> Value:
    """Division of integers as in C: toward zero."""
    if isinstance(a, int) and isinstance(b, int):
        quotient = abs(a) // abs(b)
        return quotient if (a < 0) == (b < 0) else -quotient
    quotient = np.floor_divide(a, b)
    return quotient + ((quotient * b != a) & (np.less(a, 0) != np.less(b, 0)))


def _trunc_mod(a: Value, b: Value) -> Value:
    return a - b * _trunc_div(a, b)


_ARITHMETIC: dict[str, tuple[Callable[[Value, Value], Value], Callable[[Value, Value], Value]]] = {
    "Add": (lambda a, b: a + b, lambda a, b: a + b),
    "Sub": (lambda a, b: a - b, lambda a, b: a - b),
    "Mul": (lambda a, b: a * b, lambda a, b: a * b),
    "Div": (lambda a, b: a / b, _trunc_div),
    "Mod": (np.fmod, _trunc_mod),
    "FloorDiv": (np.floor_divide, lambda a, b: a // b),
    "FloorMod": (np.mod, lambda a, b: a % b),
    "Min": (np.minimum, np.minimum),
    "Max": (np.maximum, np.maximum),
    "LShift": (np.left_shift, lambda a, b: a << b),
    "RShift": (np.right_shift, lambda a, b: a >> b),
    "BitwiseAnd": (np.bitwise_and, lambda a, b: a & b),
    "BitwiseOr": (np.bitwise_or, lambda a, b: a | b),
    "BitwiseXor": (np.bitwise_xor, lambda a, b: a ^ b),
}
_WRAPPING = ("Add", "Sub", "Mul", "LShift")  # what can leave the range of an unsigned integer
_COMPARISONS: dict[str, Callable[[Value, Value], Value]] = {
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
}
_CALLED_ARITHMETIC = {  # operators that TIR has as calls as well
    "tirx.shift_left": "LShift",
    "tirx.shift_right": "RShift",
    "tirx.bitwise_and": "BitwiseAnd",
    "tirx.bitwise_or": "BitwiseOr",
    "tirx.bitwise_xor": "BitwiseXor",
}
_COUNTED = {"Mul": "Mul", "Add": "Add", "Sub": "Add", "Min": "Min", "Max": "Min"}


def _erf(values: Value) -> Value:
    from scipy.special import erf

    return erf(values)


def _sigmoid(values: Value) -> Value:
    return 1 / (1 + np.exp(-values))


_MATH: dict[str, Callable[..., Value]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "exp10": lambda x: np.power(np.float32(10), x),
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": _erf,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "sin": np.sin,
    "cos": np.cos,
    "fabs": np.abs,
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "nearbyint": np.rint,
    "trunc": np.trunc,
    "pow": np.power,
    "fmax": np.maximum,
    "fmin": np.minimum,
    "max": np.maximum,
    "min": np.minimum,
    "fma": lambda a, b, c: a * b + c,
}


def _function(name: str) -> Callable[..., Value] | None:
    """The function of a name such as `expf`, `__expf`, `hexp` or `tirx.exp`."""
    plain = name.removeprefix("tirx.").removeprefix("__").removesuffix("f")
    for candidate in (name.removeprefix("tirx."), plain, plain.removeprefix("h")):
        if candidate in _MATH:
            return _MATH[candidate]
    return None


@dataclass(frozen=True)
class _Place:
    """Where a buffer lies.

    Attributes:
        memory: an array, registers, or the shared memory.
        dtype: of an element, as the buffer has it.
        offset: of its first element, in bytes.
        size: elements.
        name: of the buffer.
    """

    memory: Array | Registers | Shared
    dtype: np.dtype[Any]
    offset: int
    size: int
    name: str


def _reads_memory(node: Any, places: Mapping[Any, _Place]) -> bool:
    """Whether an expression loads from other than registers."""
    import tvm_ffi
    from tvm.ir import TensorLoad

    found: list[Any] = []
    tvm_ffi.structural_walk(node, (TensorLoad, found.append), order="post")
    return any(each.source not in places or not isinstance(places[each.source].memory, Registers) for each in found)


class _Compiler:
    """Makes Python functions of TIR, once, that are called as often as it runs."""

    def __init__(self, machine: Machine, layout: Layout, arrays: Mapping[Any, Argument]) -> None:
        self.machine = machine
        self._layout = layout
        self._arrays = arrays
        self._places: dict[Any, _Place] = {}
        self._names: dict[Any, tuple[Code, bool]] = {}  # variables: how to get one, whether it never changes
        self._values: list[Value] = []
        self._sites = 0

    # --- statements ---

    def statement(self, node: Any) -> Statement:
        """What executes a statement for the lanes of a mask."""
        match type(node).__name__:
            case "SeqStmt":
                return self._sequence([self.statement(each) for each in node.seq])
            case "AttrStmt":
                return self._attribute(node)
            case "For":
                return self._for(node)
            case "While":
                return self._while(node)
            case "IfThenElse":
                return self._if(node)
            case "Bind":
                return self._bind(node)
            case "BufferStore":
                return self._store(node)
            case "Evaluate":
                return self._evaluate(node.value)
            case "AllocBuffer":
                return self._allocate(node.buffer)
            case "DeclBuffer":
                self._declare(node.buffer, node.data)
                return lambda mask: None
            case kind:
                raise AnalysisError(f"a kernel with a statement of the kind {kind}")

    @staticmethod
    def _sequence(codes: Sequence[Statement]) -> Statement:
        plain = [code for code in codes if not isinstance(code, Waiting)]
        if len(plain) == len(codes):

            def sequence(mask: Mask) -> None:
                for code in plain:
                    code(mask)

            return sequence

        def steps(mask: Mask) -> Steps:
            for code in codes:
                if isinstance(code, Waiting):
                    yield from code.run(mask)
                else:
                    code(mask)

        return Waiting(steps)

    def _attribute(self, node: Any) -> Statement:
        machine, key = self.machine, str(node.attr_key)
        if key == "thread_extent":
            values = machine.axis(str(node.node.thread_tag))
            self._names[node.node.var] = (lambda mask: values), True
            return self.statement(node.body)
        body = self.statement(node.body)
        if key == "async_commit_queue_scope":  # TVM makes a group of what is inside
            return self._sequence([body, lambda mask: machine.shared.commit(machine.lanes(mask))])
        if key == "async_wait_inflight_count":
            pending = int(node.value)
            return self._sequence([lambda mask: machine.shared.wait(machine.lanes(mask), pending), body])
        return body

    def _for(self, node: Any) -> Statement:
        first, extent = self.code(node.min), self.code(node.extent)
        slot, values = self._slot(node.loop_var), self._values
        body = self.statement(node.body)

        machine = self.machine

        def masks(mask: Mask) -> Iterator[Mask]:
            """The lanes of each iteration, whose number has been set."""
            begin, count = machine.decided(first, mask), machine.decided(extent, mask)
            if _uniform(begin) and _uniform(count):
                for i in range(int(count)):
                    values[slot] = int(begin) + i
                    yield mask
                return
            for i in range(int(np.max(np.broadcast_to(count, machine.all_lanes.shape)[machine.lanes(mask)]))):
                inside = i < np.broadcast_to(count, machine.all_lanes.shape)
                inside = inside if mask is None else inside & mask
                if inside.any():
                    values[slot] = begin + i
                    yield inside

        if isinstance(body, Waiting):
            waiting = body.run

            def steps(mask: Mask) -> Steps:
                for inside in masks(mask):
                    yield from waiting(inside)

            return Waiting(steps)
        plain = body

        def loop(mask: Mask) -> None:
            for inside in masks(mask):
                plain(inside)

        return loop

    def _while(self, node: Any) -> Statement:
        condition, body = self.code(node.condition), self.statement(node.body)
        machine = self.machine

        def steps(mask: Mask) -> Steps:
            while True:
                holds = machine.decided(condition, mask)
                if _uniform(holds):
                    if not holds:
                        return
                else:
                    mask = holds if mask is None else holds & mask
                    if mask is None or not mask.any():
                        return
                if isinstance(body, Waiting):
                    yield from body.run(mask)
                else:
                    body(mask)
                yield Turn()

        return Waiting(steps)

    def _if(self, node: Any) -> Statement:
        condition = self.code(node.condition)
        then = self.statement(node.then_case)
        otherwise = self.statement(node.else_case) if node.else_case is not None else None
        machine = self.machine

        def sides(mask: Mask) -> list[tuple[Statement, Mask]]:
            """The sides that are taken, and by which lanes."""
            holds = machine.decided(condition, mask)
            if _uniform(holds):
                taken = then if holds else otherwise
                return [] if taken is None else [(taken, mask)]
            found: list[tuple[Statement, Mask]] = []
            inside = holds if mask is None else holds & mask
            if inside.any():
                found.append((then, None if mask is None and inside.all() else inside))
            if otherwise is not None:
                inside = ~holds if mask is None else ~holds & mask
                if inside.any():
                    found.append((otherwise, inside))
            return found

        if isinstance(then, Waiting) or isinstance(otherwise, Waiting):

            def steps(mask: Mask) -> Steps:
                waiting = []
                for side, inside in sides(mask):
                    if isinstance(side, Waiting):
                        waiting.append(side.run(inside))
                    else:
                        side(inside)
                if len(waiting) == 1:
                    yield from waiting[0]
                elif waiting:
                    yield Fork(tuple(waiting))

            return Waiting(steps)

        def branch(mask: Mask) -> None:
            for side, inside in sides(mask):
                side(inside)  # type: ignore[operator]  # as neither waits

        return branch

    def run(self, code: Statement, size: int | None, together: bool) -> None:
        """Execute a statement: all lanes in lock step, or so many of a block.

        Args:
            code: the statement.
            size: of what is in lock step; None for all.
            together: whether whole warpgroups are in any case.
        """
        machine = self.machine
        if not isinstance(code, Waiting):
            code(machine.everybody)
            return
        waiting, threads = code.run, machine.threads
        masks = [machine.everybody]
        if size is not None:
            block, thread = np.divmod(machine.all_lanes, threads.padded)
            whole = threads.real // WARPGROUP * WARPGROUP if together else 0
            sizes = np.where(thread < whole, WARPGROUP, size)
            part = block * threads.padded + thread // sizes * sizes
            masks = [(part == each) & machine.real for each in np.unique(part)]
        families: list[list[Value]] = [list(self._values) for _ in masks]
        current = 0

        def switch(family: int) -> None:
            """Loops and names have the values that they have in this part."""
            nonlocal current
            if family != current:
                families[current], self._values[:] = self._values[:], families[family]
                current = family

        run([waiting(mask) for mask in masks], switch, machine.land)

    def _bind(self, node: Any) -> Callable[[Mask], None]:
        code, static = self._expression(node.value)
        if static:
            self._names[node.var] = self._once(code), True
            return lambda mask: None
        slot, values, machine = len(self._values), self._values, self.machine
        values += [None, False]  # and whether it depends on memory

        def read(mask: Mask) -> Value:
            machine.loaded |= values[slot + 1]
            return values[slot]

        def bind(mask: Mask) -> None:
            machine.loaded = False
            value = code(mask)  # a copy: registers that it was read from may change
            values[slot : slot + 2] = value.copy() if isinstance(value, np.ndarray) else value, machine.loaded

        self._names[node.var] = read, False
        return bind

    def _slot(self, variable: Any) -> int:
        slot, values = len(self._values), self._values
        values.append(None)
        self._names[variable] = (lambda mask: values[slot]), False
        return slot

    def _allocate(self, buffer: Any) -> Callable[[Mask], None]:
        scope, dtype = str(buffer.scope()), str(buffer.dtype)
        size = math.prod(int(extent) for extent in buffer.shape)
        name = str(buffer.name)
        if scope.startswith("shared"):
            self._places[buffer] = _Place(
                self.machine.shared, numpy_dtype(dtype), SHARED_BASE + self._layout.offsets[buffer], size, name
            )
            self.machine.buffers.append((SHARED_BASE + self._layout.offsets[buffer], name))
            return lambda mask: None
        if scope != "local":
            raise AnalysisError(f"a buffer in {scope} memory: {name}")
        registers = Registers.unwritten(name, dtype, size, self.machine.threads.lanes)
        self._places[buffer] = _Place(registers, numpy_dtype(dtype), 0, size, name)
        return lambda mask: registers.forget() if mask is None else None

    def _declare(self, buffer: Any, data: Any) -> None:
        memory = self._memory(data)
        dtype = numpy_dtype(str(buffer.dtype))
        # What it may touch is what it lies in: where TVM has merged buffers, indices begin there, and shapes are stale.
        size = memory.size * memory.dtype.itemsize // dtype.itemsize
        offset = memory.offset + int(buffer.elem_offset) * dtype.itemsize
        if isinstance(memory.memory, Registers) and (offset or memory.memory.data.dtype.itemsize != dtype.itemsize):
            raise AnalysisError(f"registers of {memory.memory.data.dtype} that are used as {dtype}: {buffer.name}")
        self._places[buffer] = _Place(memory.memory, dtype, offset, size, str(buffer.name))

    def _memory(self, data: Any) -> _Place:
        """Where a pointer to a buffer as a whole points to."""
        if type(data).__name__ == "Call" and str(data.op.name) == "tirx.buffer_data":
            data = data.args[0]
        if data in self._places:
            return self._places[data]
        if data in self._arrays:
            array = self._arrays[data]
            if isinstance(array, Mapped):
                raise AnalysisError(f"the elements of a tensor map: {data}")
            return _Place(array, array.dtype, 0, array.size, array.name)
        raise AnalysisError(f"memory of which it is not known what it is: {data}")

    def _evaluate(self, value: Any) -> Statement:
        if type(value).__name__ == "Call":
            found = instructions.statement(value, self)
            if isinstance(found, Waiting):
                return found
            if found is not None:
                site, machine, plain = self._site(), self.machine, found

                def sited(mask: Mask) -> None:
                    machine.site = site
                    plain(mask)

                return sited
        code, _ = self._expression(value)
        return lambda mask: code(mask)

    def _store(self, node: Any) -> Callable[[Mask], None]:
        place = self._places[node.buffer]
        code, index = self.code(node.value), self.code(node.indices[0])
        lanes = node.value.ty.dtype.lanes
        if getattr(node, "predicate", None) is not None:
            raise AnalysisError(f"a store with a predicate of its own: {node.buffer.name}")
        if isinstance(place.memory, Registers):
            return self._store_registers(place, code, index)
        machine, dtype, memory = self.machine, place.dtype, place.memory
        site = self._site()

        def store(mask: Mask) -> None:
            active = machine.lanes(mask)
            value, at = code(mask), self._picked(machine.decided(index, mask), active, lanes)
            machine.site = site
            self._check_index(place, at)
            value = np.asarray(value)
            if value.ndim == 0:
                rows = np.full((len(active), lanes), value.astype(dtype))
            else:
                value = value if value.ndim == 2 else value[:, None]
                value = value if mask is None or len(value) == 1 else value[active]
                rows = np.broadcast_to(value.astype(dtype, copy=False), (len(active), lanes))
            rows = np.ascontiguousarray(rows)
            machine.store(memory, *self._whole(at, place), rows, active, place.name, dtype.itemsize)

        return store

    def _store_registers(self, place: _Place, code: Code, index: Code) -> Callable[[Mask], None]:
        registers = place.memory
        assert isinstance(registers, Registers)
        data, written, loaded = registers.data.view(place.dtype), registers.written, registers.loaded
        machine = self.machine

        def store(mask: Mask) -> None:
            machine.loaded = False
            value, at = code(mask), index(mask)
            depends = machine.loaded
            if registers.accumulators is not None:
                registers.accumulators.touch(at, mask)
            if isinstance(at, int):
                if not 0 <= at < place.size:
                    raise ExecutionError(f"out of bounds: element {at} of {place.name}, which has {place.size}")
                if isinstance(value, np.ndarray) and value.ndim == 2:
                    value = value[:, 0]
                if mask is None:
                    data[at] = value
                    written[at] = True
                    loaded[at] = depends
                else:
                    np.copyto(data[at], value, where=mask, casting="unsafe")
                    written[at] |= mask
                    loaded[at] |= depends
                return
            active = machine.lanes(mask)
            at = np.asarray(at)
            at = at[:, None] if at.ndim == 1 else at
            at = np.broadcast_to(at, (machine.threads.lanes, at.shape[1]))[active]
            self._check_index(place, at)
            value = np.asarray(value)
            if value.ndim:
                value = value if value.ndim == 2 else value[:, None]
                value = np.broadcast_to(value, (machine.threads.lanes, value.shape[1]))[active]
            data[at, active[:, None]] = value
            written[at, active[:, None]] = True
            loaded[at] |= depends

        return store

    def _site(self) -> int:
        self._sites += 1
        return self._sites

    # --- accesses ---

    def _picked(self, at: Value, active: NDArray[np.intp], lanes: int) -> NDArray[np.int64]:
        """The indices of active lanes, of shape (active, elements of the vector)."""
        at = np.asarray(at, np.int64)
        if at.ndim == 0:
            return np.full((len(active), 1), at)
        if at.ndim == 1:
            return at[active][:, None]
        return np.broadcast_to(at, (len(active), lanes)) if len(at) == 1 else at[active]

    @staticmethod
    def _check_index(place: _Place, at: NDArray[np.int64]) -> None:
        if at.size and (int(at.min()) < 0 or int(at.max()) >= place.size):
            worst = int(at.min()) if int(at.min()) < 0 else int(at.max())
            raise ExecutionError(f"out of bounds: element {worst} of {place.name}, which has {place.size}")

    @staticmethod
    def _whole(at: NDArray[np.int64], place: _Place) -> tuple[NDArray[np.int64], int]:
        """Where accesses begin, in bytes, and how many elements each of them has in a row."""
        count = at.shape[1]
        if count > 1 and np.any(np.diff(at, axis=1) != 1):
            return at * place.dtype.itemsize + place.offset, 1
        return at[:, :1] * place.dtype.itemsize + place.offset, count

    def _load(self, node: Any) -> Code:
        place = self._places.get(node.source)
        if place is None:
            raise AnalysisError(f"memory of which it is not known what it is: {node.source}")
        index = self.code(node.indices[0])
        machine, dtype = self.machine, place.dtype
        lanes = node.ty.dtype.lanes
        integer = dtype.kind in "iub"
        if isinstance(place.memory, Registers):
            return self._load_registers(place, index, integer=integer)
        memory, site = place.memory, self._site()

        def load(mask: Mask) -> Value:
            active = machine.lanes(mask)
            at = self._picked(machine.decided(index, mask), active, lanes)
            self._check_index(place, at)
            machine.site = site
            rows = machine.load(memory, *self._whole(at, place), dtype, active, place.name)
            rows = rows.astype(_integers(dtype)) if integer else rows
            rows = rows[:, 0] if lanes == 1 else rows
            if mask is None:
                return rows
            full = np.zeros((machine.threads.lanes, *rows.shape[1:]), rows.dtype)
            full[active] = rows
            return full

        return load

    def _load_registers(self, place: _Place, index: Code, *, integer: bool) -> Code:
        registers, machine = place.memory, self.machine
        assert isinstance(registers, Registers)
        data, written, loaded = registers.data.view(place.dtype), registers.written, registers.loaded

        integers = _integers(place.dtype)

        def check(known: NDArray[np.bool_], mask: Mask) -> None:
            real: NDArray[np.bool_] = machine.real if mask is None else mask
            if not known.all() and not known[real].all():
                raise ExecutionError(f"{place.name} is read before it is written")

        def load(mask: Mask) -> Value:
            at = index(mask)
            if registers.accumulators is not None:
                registers.accumulators.touch(at, mask)
            if isinstance(at, int):
                if not 0 <= at < place.size:
                    raise ExecutionError(f"out of bounds: element {at} of {place.name}, which has {place.size}")
                machine.loaded |= bool(loaded[at])
                if integer:
                    check(written[at], mask)
                    return data[at].astype(integers)
                return data[at]
            at = np.asarray(at)
            at = at[:, None] if at.ndim == 1 else at
            at = np.broadcast_to(at, (machine.threads.lanes, at.shape[1]))
            real = machine.real if mask is None else mask
            self._check_index(place, at[real])
            at = np.where(real[:, None], at, 0)
            machine.loaded |= bool(loaded[at].any())
            lane = machine.all_lanes[:, None]
            if integer:
                check(np.asarray(written[at, lane].all(axis=1)), mask)
            found = data[at, lane].astype(integers) if integer else data[at, lane]
            return found[:, 0] if found.shape[1] == 1 else found

        return load

    # --- expressions ---

    def code(self, node: Any) -> Code:
        """A function that evaluates an expression for the lanes of a mask; what never changes, once."""
        code, static = self._expression(node)
        return self._once(code) if static else code

    @staticmethod
    def _once(code: Code) -> Code:
        found: list[Value] = []

        def once(mask: Mask) -> Value:
            if not found:
                found.append(code(None))
            return found[0]

        return once

    def _expression(self, node: Any) -> tuple[Code, bool]:
        """How to evaluate an expression, and whether it is the same whenever it is."""
        kind = type(node).__name__
        if kind == "IntImm":
            number = bool(node.value) if node.ty.dtype.is_bool else int(node.value)
            number = _as_uint64(number) if str(node.ty.dtype) == "uint64" else number
            return (lambda mask: number), True
        if kind == "FloatImm":
            real = numpy_dtype(str(node.ty.dtype)).type(node.value)
            return (lambda mask: real), True
        if kind == "Var":
            if node not in self._names:
                raise AnalysisError(f"a variable of which it is not known what it is: {node}")
            return self._names[node]
        if kind in _ARITHMETIC:
            return self._arithmetic(kind, node, node.a, node.b)
        if kind in _COMPARISONS:
            compare = _COMPARISONS[kind]
            (a, b), static = self._both(node.a, node.b)
            return (lambda mask: compare(a(mask), b(mask))), static
        match kind:
            case "And" | "Or":
                return self._logical(kind, node)
            case "Not":
                a, static = self._expression(node.a)

                def negation(mask: Mask) -> Value:
                    value = a(mask)
                    return ~value if isinstance(value, np.ndarray) else not value

                return negation, static
            case "Cast":
                return self._cast(node)
            case "Select":
                return self._select(node.condition, node.true_value, node.false_value)
            case "TensorLoad":
                return self._load(node), False
            case "Ramp":
                (base, stride), static = self._both(node.base, node.stride)
                steps = np.arange(int(node.lanes))

                def ramp(mask: Mask) -> Value:
                    first = base(mask)
                    first = first[:, None] if isinstance(first, np.ndarray) else first
                    found = first + stride(mask) * steps
                    return found if found.ndim == 2 else found[None, :]

                return ramp, static
            case "Broadcast":
                value, static = self._expression(node.value)

                def broadcast(mask: Mask) -> Value:
                    found = value(mask)
                    return found[:, None] if isinstance(found, np.ndarray) and found.ndim == 1 else found

                return broadcast, static
            case "Shuffle":
                return self._shuffle(node)
            case "Call":
                return self._call(node)
        raise AnalysisError(f"{kind} in {node}")

    def _both(self, a: Any, b: Any) -> tuple[tuple[Code, Code], bool]:
        (first, one), (second, two) = self._expression(a), self._expression(b)
        if one and two:
            return (first, second), True
        return (self._once(first) if one else first, self._once(second) if two else second), False

    def _arithmetic(self, kind: str, node: Any, first: Any, second: Any) -> tuple[Code, bool]:
        (a, b), static = self._both(first, second)
        dtype = node.ty.dtype
        real, whole = _ARITHMETIC[kind]
        if dtype.is_float:
            code: Code = lambda mask: real(a(mask), b(mask))  # noqa: E731
            watch, machine = self.machine.watch, self.machine
            if watch is not None and kind in _COUNTED:
                name, lanes, itemsize = _COUNTED[kind], dtype.lanes, dtype.itemsize // dtype.lanes
                plain, told = code, watch

                def counted(mask: Mask) -> Value:
                    told.operation(name, machine.lanes(mask), lanes, itemsize)
                    return plain(mask)

                return counted, False
            return code, static
        if kind in ("Min", "Max"):

            def extremum(mask: Mask) -> Value:
                one, two = a(mask), b(mask)
                if isinstance(one, int) and isinstance(two, int):
                    return min(one, two) if kind == "Min" else max(one, two)
                return whole(one, two)

            return extremum, static
        text = str(dtype).partition("x")[0]
        if text == "uint64":
            return (lambda mask: _as_uint64(whole(_as_uint64(a(mask)), _as_uint64(b(mask))))), static
        if text.startswith("uint") and kind in _WRAPPING:
            most = (1 << int(dtype.bits)) - 1
            return (lambda mask: whole(a(mask), b(mask)) & most), static
        return (lambda mask: whole(a(mask), b(mask))), static

    def _logical(self, kind: str, node: Any) -> tuple[Code, bool]:
        (a, b), static = self._both(node.a, node.b)

        def both(mask: Mask) -> Value:
            """In C the second is not evaluated where the first decides."""
            first = a(mask)
            decided = kind == "Or"
            if _uniform(first):
                return first if bool(first) == decided else b(mask)
            if first.ndim == 1:
                open_ = ~first if decided else first
                second = b(open_ if mask is None else open_ & mask)
            else:
                second = b(mask)
            return first | second if decided else first & second

        return both, static

    def _select(self, condition: Any, then: Any, otherwise: Any) -> tuple[Code, bool]:
        holds, certain = self._expression(condition)
        (yes, no), static = self._both(then, otherwise)
        holds = self._once(holds) if certain and not static else holds

        machine = self.machine
        accesses = _reads_memory(then, self._places) or _reads_memory(otherwise, self._places)

        def select(mask: Mask) -> Value:
            which = machine.decided(holds, mask) if accesses else holds(mask)
            if _uniform(which):
                return yes(mask) if which else no(mask)
            if which.ndim == 2:
                return np.where(which, yes(mask), no(mask))
            inside = which if mask is None else which & mask
            outside = ~which if mask is None else ~which & mask
            if not inside.any():
                return no(mask)
            if not outside.any():
                return yes(mask)
            one, other = yes(inside), no(outside)
            vector = any(isinstance(each, np.ndarray) and each.ndim == 2 for each in (one, other))
            return np.where(which[:, None] if vector else which, one, other)

        return select, static and certain

    def _cast(self, node: Any) -> tuple[Code, bool]:
        value, static = self._expression(node.value)
        to, source = node.ty.dtype, node.value.ty.dtype
        text = str(to).partition("x")[0]
        if to.is_float:
            kind = numpy_dtype(text)
            return (lambda mask: np.asarray(value(mask)).astype(kind)[()]), static
        if to.is_bool:
            return (lambda mask: value(mask) != 0), static
        bits = min(int(to.bits), 63)

        def cast(mask: Mask) -> Value:
            found = value(mask)
            if text == "uint64" and not source.is_float:
                return _as_uint64(found)
            if source.is_float:
                found = np.trunc(np.asarray(found, np.float64)).astype(np.int64)[()]
            elif isinstance(found, np.ndarray):
                found = found.astype(np.int64, copy=False)
            else:
                found = int(found)
            if text.startswith("uint"):
                return found & ((1 << bits) - 1)
            if bits < 63 and not (source.is_integer and source.bits < to.bits):
                half = 1 << (bits - 1)
                return ((found + half) & ((1 << bits) - 1)) - half
            return found

        return cast, static

    def _shuffle(self, node: Any) -> tuple[Code, bool]:
        vectors = [self.code(vector) for vector in node.vectors]
        chosen = [int(index) for index in node.indices]
        counts = [vector.ty.dtype.lanes for vector in node.vectors]

        def shuffle(mask: Mask) -> Value:
            columns = []
            for vector, count in zip(vectors, counts, strict=True):
                found = np.asarray(vector(mask))
                found = found.reshape(1, 1) if found.ndim == 0 else found[:, None] if found.ndim == 1 else found
                columns += [np.broadcast_to(found, (len(found), count))[:, i] for i in range(count)]
            picked = [columns[i] for i in chosen]
            if len(picked) == 1:
                return picked[0]
            return np.stack(np.broadcast_arrays(*picked), axis=1)

        return shuffle, False

    def _call(self, node: Any) -> tuple[Code, bool]:
        name = str(node.op.name)
        if name == "prim.if_then_else":
            return self._select(*node.args)
        if name in ("tirx.likely", "tirx.ret"):
            return self._expression(node.args[0])
        if name in _CALLED_ARITHMETIC:
            return self._arithmetic(_CALLED_ARITHMETIC[name], node, *node.args)
        if name == "tirx.reinterpret":
            return self._reinterpret(node)
        if name == "tirx.address_of":
            argument = self._arrays.get(node.args[0]) if type(node.args[0]).__name__ == "Var" else None
            if argument is not None:
                return (lambda mask: Pointer(argument, 0, argument.name)), False
            return self._address(node.args[0]), False
        if name == "tirx.buffer_data":
            place = self._memory(node)
            return (lambda mask: Pointer(place.memory, place.offset, place.name)), False
        if name in ("tirx.call_pure_extern", "tirx.call_extern"):
            called, arguments = str(node.args[0].value), node.args[1:]
        else:
            called, arguments = name, node.args
        function = _function(called)
        if function is not None and node.ty.dtype.is_float:
            codes = [self.code(argument) for argument in arguments]
            kind = numpy_dtype(str(node.ty.dtype).partition("x")[0])
            chosen = function

            def call(mask: Mask) -> Value:
                given = [np.asarray(code(mask)) for code in codes]
                return np.asarray(chosen(*(each.astype(np.float32) for each in given))).astype(kind)[()]

            return call, False
        found = instructions.expression(node, self)
        if found is not None:
            return found, False
        raise AnalysisError(f"a call that cannot be executed: {called}")

    def _reinterpret(self, node: Any) -> tuple[Code, bool]:
        value, static = self._expression(node.args[-1])
        if str(node.ty).startswith("T.handle"):  # of a pointer, which stays what it is
            return value, static
        source = numpy_dtype(str(node.args[-1].ty.dtype).partition("x")[0])
        to = numpy_dtype(str(node.ty.dtype).partition("x")[0])

        def reinterpret(mask: Mask) -> Value:
            found = np.asarray(value(mask))
            shape = found.shape
            found = np.ascontiguousarray(found.astype(source)).reshape(-1).view(to).reshape(shape)
            return found.astype(_integers(to))[()] if to.kind in "iu" else found[()]

        return reinterpret, static

    def _address(self, load: Any) -> Code:
        place = self._places.get(load.source)
        if place is None:
            raise AnalysisError(f"the address of {load.source}, of which it is not known what it is")
        index, size = self.code(load.indices[0]), place.dtype.itemsize
        return lambda mask: Pointer(place.memory, place.offset + index(mask) * size, place.name)

    # --- what instructions ask for ---

    def registers(self, node: Any) -> tuple[Registers, Code]:
        """The registers that an operand such as `acc[3]` is, and the index in them."""
        if type(node).__name__ == "TensorLoad":
            place = self._places.get(node.source)
            if place is not None and isinstance(place.memory, Registers):
                return place.memory, self.code(node.indices[0])
        raise AnalysisError(f"an operand that is no register: {node}")
