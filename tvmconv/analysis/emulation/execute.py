"""Lowered device functions, executed with NumPy: no GPU, and stricter than one.

All threads of a block, and many blocks at once, run in lock step: a value is a number, or an array of one for each
lane. `execute` runs one device function on arrays and changes them; what no kernel may do raises `ExecutionError`:
leaving an array, misaligned vectors, races for shared memory, barriers that not all threads reach, registers read as
integers before they are written. Memory that nobody has written is NaN.

The two sides of a branch in which threads wait for each other, at mbarriers or barriers, are executed in turns
(`synchronization.strands`). Where lock step itself keeps threads from going on, all is executed again, by warpgroups,
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
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.analysis.emulation.errors import DeadlockError, ExecutionError
from tvmconv.analysis.emulation.instructions import dispatch
from tvmconv.analysis.emulation.machine import Machine, Mask, Statement, Waiting
from tvmconv.analysis.emulation.memory.arrays import Array, Mapped
from tvmconv.analysis.emulation.memory.history import SHARED_BASE
from tvmconv.analysis.emulation.memory.registers import Registers
from tvmconv.analysis.emulation.memory.shared import Shared
from tvmconv.analysis.emulation.memory.unchecked import Unchecked
from tvmconv.analysis.emulation.synchronization.strands import Fork, Steps, Turn, run
from tvmconv.analysis.emulation.threads import Threads
from tvmconv.analysis.emulation.translation.arithmetic import (
    Value,
    uniform,
)
from tvmconv.analysis.emulation.translation.expressions import Argument, Code, Expressions, Place
from tvmconv.analysis.emulation.translation.layout import Layout, shared_layout
from tvmconv.analysis.emulation.watch import Recorder, Watch
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


def execute(
    function: PrimFunc,
    launch: Launch,
    arrays: Sequence[Argument],
    *,
    blocks: Sequence[Block] | None = None,
    watch: Watch | None = None,
    checked: bool = True,
) -> None:
    """Run a lowered device function on arrays, which it changes.

    Args:
        function: the device function.
        launch: its grid, block and cluster.
        arrays: what its parameters point to, or are tensor maps of: see `arguments`.
        blocks: which blocks of the grid to run, as (x, y, z), with the others of their clusters; all by default.
        watch: is told of what happens.
        checked: whether values matter, and races; if not, `watch` is told what is accessed and arrays are left as
            they are.

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
        _execute(function, threads, layout, arrays, watch, checked)


def arguments(step: LoweredStep, arrays: Sequence[Array]) -> list[Argument]:
    """What a step's parameters are given, of arrays in the order of `LoweredStep.arguments`' indices."""
    maps = dict(step.tensor_maps)
    return [Mapped(arrays[i], maps[at]) if at in maps else arrays[i] for at, i in enumerate(step.arguments)]


def _execute(
    function: PrimFunc,
    threads: Threads,
    layout: Layout,
    arrays: Sequence[Argument],
    watch: Watch | None,
    checked: bool,
) -> None:
    """Run blocks together: in lock step as far as they can, and by warpgroup or warp where they wait for each other."""
    given = [each.array if isinstance(each, Mapped) else each for each in arrays]
    waits = _waits(function)
    before = [array.raw.copy() for array in given] if waits and checked else []
    together = any("wgmma" in name for name in _calls(function))
    memory = Shared if checked else Unchecked
    for size in (None, WARPGROUP, WARP) if waits else (None,):
        recorded = Recorder(watch) if watch is not None and waits else watch
        machine = Machine(threads, memory(threads, layout.nbytes, layout.unit), recorded)
        program = _Compiler(machine, layout, dict(zip(function.params, arrays, strict=True)))
        code = program.statement(function.body)
        if recorded is not None:
            recorded.begin(threads)
        try:
            with np.errstate(all="ignore"):
                program.run(code, size, together)
        except DeadlockError:
            if not waits or size == WARP:
                raise
            if checked:
                for array, raw in zip(given, before, strict=True):
                    array.raw[:] = raw
            continue
        if checked:
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


class _Compiler(Expressions):
    """Makes Python functions of TIR, once, that are called as often as it runs."""

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
                self._statement += 1
                return self._bind(node)
            case "BufferStore":
                self._statement += 1
                return self._store(node)
            case "Evaluate":
                self._statement += 1
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
            if uniform(begin) and uniform(count):
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
                if uniform(holds):
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
            if uniform(holds):
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
            self._places[buffer] = Place(
                self.machine.shared, numpy_dtype(dtype), SHARED_BASE + self._layout.offsets[buffer], size, name
            )
            self.machine.buffers.append((SHARED_BASE + self._layout.offsets[buffer], name))
            return lambda mask: None
        if scope != "local":
            raise AnalysisError(f"a buffer in {scope} memory: {name}")
        registers = Registers.unwritten(name, dtype, size, self.machine.threads.lanes)
        self._places[buffer] = Place(registers, numpy_dtype(dtype), 0, size, name)
        return lambda mask: registers.forget() if mask is None else None

    def _declare(self, buffer: Any, data: Any) -> None:
        memory = self._memory(data)
        dtype = numpy_dtype(str(buffer.dtype))
        # What it may touch is what it lies in: where TVM has merged buffers, indices begin there, and shapes are stale.
        size = memory.size * memory.dtype.itemsize // dtype.itemsize
        offset = memory.offset + int(buffer.elem_offset) * dtype.itemsize
        if isinstance(memory.memory, Registers) and (offset or memory.memory.data.dtype.itemsize != dtype.itemsize):
            raise AnalysisError(f"registers of {memory.memory.data.dtype} that are used as {dtype}: {buffer.name}")
        self._places[buffer] = Place(memory.memory, dtype, offset, size, str(buffer.name))

    def _evaluate(self, value: Any) -> Statement:
        if type(value).__name__ == "Call":
            found = dispatch.statement(value, self)
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

    def _store_registers(self, place: Place, code: Code, index: Code) -> Callable[[Mask], None]:
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
