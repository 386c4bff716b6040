"""Lowered device functions, executed with NumPy: no GPU, and stricter than one.

All threads of a block, and many blocks at once, run in lock step: a value is a number, or an array of one for each
lane. `execute` runs one device function on arrays and changes them; what no kernel may do raises `ExecutionError`:
leaving an array, misaligned vectors, races for shared memory, barriers that not all threads reach, registers read as
integers before they are written. Memory that nobody has written is NaN.

The two sides of a branch in which threads wait for each other, at mbarriers or barriers, are executed in turns
(`synchronization.fibers`). Where lock step itself keeps threads from going on, all is executed again, by warpgroups,
and then by warps, but for whole warpgroups where they multiply together. That nobody can go on even so is a
`DeadlockError` that tells who waits where, and for what. Tensor maps are given as `TensorMapArray` arrays
(`arguments`).

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

from tvmconv.arithmetic import round_up
from tvmconv.emulator.blocks import BlockIndex, expand_to_clusters
from tvmconv.emulator.errors import DeadlockError
from tvmconv.emulator.memory.arrays import Argument, TensorMapArray
from tvmconv.emulator.memory.shared_memory import SharedMemory
from tvmconv.emulator.memory.unchecked_memory import UncheckedSharedMemory
from tvmconv.emulator.observers import AccessObserver, EventRecorder
from tvmconv.emulator.state import EmulatorState
from tvmconv.emulator.threads import EmulatedThreads
from tvmconv.emulator.translation.layout import SharedMemoryLayout, plan_shared_memory
from tvmconv.emulator.translation.statements import StatementTranslator
from tvmconv.gpu_specs import WARP_SIZE, WARPGROUP_SIZE

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

    from tvmconv.compiler.executable import LaunchConfig

MAX_LANES = 1 << 15  # that are executed together
MAX_SHARED_BYTES = 1 << 26  # of all of them


def execute(
    function: PrimFunc,
    launch: LaunchConfig,
    arrays: Sequence[Argument],
    *,
    blocks: Sequence[BlockIndex] | None = None,
    observer: AccessObserver | None = None,
    check_races: bool = True,
) -> None:
    """Run a lowered device function on arrays, which it changes.

    Args:
        function: the device function.
        launch: its grid, block and cluster.
        arrays: what its parameters point to, or are tensor maps of: see `arguments`.
        blocks: which blocks of the grid to run, as (x, y, z), with the others of their clusters; all by default.
        observer: is told of what happens.
        check_races: whether values matter, and races; if not, `observer` is told what is accessed and arrays are left
            as they are.

    Raises:
        ExecutionError: the function does what no kernel may.
        AnalysisError: it has something that cannot be executed.
    """
    blocks = expand_to_clusters(launch, blocks)
    cluster_size = math.prod(launch.cluster)
    layout = plan_shared_memory(function)
    lanes_per_block = round_up(launch.threads_per_block, WARP_SIZE)
    max_blocks = min(MAX_LANES // lanes_per_block, MAX_SHARED_BYTES // max(1, layout.nbytes))
    blocks_per_batch = max(1, max_blocks // cluster_size) * cluster_size
    for first_block in range(0, len(blocks), blocks_per_batch):
        threads = EmulatedThreads(
            launch.block, np.array(blocks[first_block : first_block + blocks_per_batch], np.int64), launch.cluster
        )
        _execute_batch(function, threads, layout, arrays, observer, check_races)


def _execute_batch(
    function: PrimFunc,
    threads: EmulatedThreads,
    layout: SharedMemoryLayout,
    arrays: Sequence[Argument],
    observer: AccessObserver | None,
    check_races: bool,
) -> None:
    """Run blocks together: in lock step as far as they can, and by warpgroup or warp where they wait for each other."""
    arrays_to_restore = [argument.array if isinstance(argument, TensorMapArray) else argument for argument in arrays]
    has_synchronization = _has_synchronization(function)
    initial_bytes = (
        [array.raw_bytes.copy() for array in arrays_to_restore] if has_synchronization and check_races else []
    )
    uses_wgmma = any("wgmma" in name for name in _collect_op_names(function))
    memory_class = SharedMemory if check_races else UncheckedSharedMemory
    for lockstep_lanes in (None, WARPGROUP_SIZE, WARP_SIZE) if has_synchronization else (None,):
        active_observer = (
            EventRecorder(observer)
            if observer is not None and has_synchronization and not observer.immediate
            else observer
        )
        state = EmulatorState(threads, memory_class(threads, layout.nbytes, layout.unit_bytes), active_observer)
        translator = StatementTranslator(state, layout, dict(zip(function.params, arrays, strict=True)))
        statement = translator.translate_statement(function.body)
        if active_observer is not None:
            active_observer.on_blocks_start(threads)
        try:
            with np.errstate(all="ignore"):
                translator.run_lockstep(statement, lockstep_lanes, uses_wgmma)
        except DeadlockError:
            if not has_synchronization or lockstep_lanes == WARP_SIZE:
                raise
            if check_races:
                for array, initial in zip(arrays_to_restore, initial_bytes, strict=True):
                    array.raw_bytes[:] = initial
            continue
        if check_races:
            state.mbarriers.check_block_exit()
            state.shared.check_block_exit()
        if isinstance(active_observer, EventRecorder) and observer is not None:
            active_observer.replay(observer)
        return


def _collect_op_names(function: PrimFunc) -> set[str]:
    """The names of all operators that a function calls."""
    import tvm_ffi
    from tvm.ir import Call

    names: set[str] = set()
    tvm_ffi.structural_walk(function.body, (Call, lambda call: names.add(str(call.op.name))), order="post")
    return names


def _has_synchronization(function: PrimFunc) -> bool:
    """Whether parts of a block may wait for each other."""
    return any(
        "mbarrier" in op_name or "bar_" in op_name or "cluster" in op_name for op_name in _collect_op_names(function)
    )
