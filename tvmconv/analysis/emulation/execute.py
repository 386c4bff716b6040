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
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tvmconv.analysis.emulation.blocks import Block, with_clusters
from tvmconv.analysis.emulation.errors import DeadlockError
from tvmconv.analysis.emulation.machine import Machine
from tvmconv.analysis.emulation.memory.arrays import Argument, Mapped
from tvmconv.analysis.emulation.memory.shared import Shared
from tvmconv.analysis.emulation.memory.unchecked import Unchecked
from tvmconv.analysis.emulation.threads import Threads
from tvmconv.analysis.emulation.translation.layout import Layout, shared_layout
from tvmconv.analysis.emulation.translation.statements import Statements
from tvmconv.analysis.emulation.watch import Recorder, Watch
from tvmconv.arithmetic import round_up
from tvmconv.gpu import WARP, WARPGROUP

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

    from tvmconv.compiler.program import Launch

MAX_LANES = 1 << 15  # that are executed together
MAX_SHARED_BYTES = 1 << 26  # of all of them


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
    lanes = round_up(launch.threads, WARP)
    fitting = min(MAX_LANES // lanes, MAX_SHARED_BYTES // max(1, layout.nbytes))
    step = max(1, fitting // cluster) * cluster
    for start in range(0, len(blocks), step):
        threads = Threads(launch.block, np.array(blocks[start : start + step], np.int64), launch.cluster)
        _execute(function, threads, layout, arrays, watch, checked)


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
        recorded = Recorder(watch) if watch is not None and waits and not watch.at_once else watch
        machine = Machine(threads, memory(threads, layout.nbytes, layout.unit), recorded)
        program = Statements(machine, layout, dict(zip(function.params, arrays, strict=True)))
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
