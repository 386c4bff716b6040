"""Execution of lowered device functions with NumPy, without a GPU and with stricter checks than one.

All threads of a block, and many blocks at once, run in lock step: a value is a number, or an array with one element per
lane. `execute` runs one device function on arrays and changes them. Illegal behavior raises `ExecutionError`: accesses
out of bounds, misaligned vectors, races for shared memory, barriers that not all threads reach, and integer registers
that are read before they are written. Unwritten memory is NaN.

The two sides of a branch run in turns as fibers if threads wait in them at barriers or mbarriers
(`synchronization.fibers`). If lock step itself prevents progress, everything is executed again with each warpgroup in
lock step, and then with each warp, except warpgroups that execute wgmma. If no thread can continue even so, a
`DeadlockError` lists the waiting threads and their barriers. Tensor maps are passed as `TensorMapArray` (`arguments`).

TMA copies complete in order of issue, and only when no thread can continue without them. The results of wgmma are in
the registers at once. The following raise a `RaceError`:

* an access to the destination of a copy without a wait for its mbarrier;
* an mbarrier that expects more bytes than are copied (a deadlock), or fewer (its phase completes too early);
* the use of an mbarrier without a barrier and fence.mbarrier_init after its initialization;
* a write to shared memory that wgmma or a bulk store may still read;
* a read by TMA or wgmma of data that threads stored without fence.proxy.async;
* an access to accumulators without wgmma.wait_group, or a wgmma into them without wgmma.fence;
* the exit of a block whose shared memory others still access, or whose copies are pending.

Floating-point arithmetic is that of NumPy in the operands' types, rounded after every operation; wgmma sums exact
products in float32. The minimum or maximum with a NaN is NaN, unlike on a GPU, so that unwritten values show after an
activation, too.

Not supported: textures, atomics, wgmma with operands in registers or not K-major, bulk copies without a tensor map,
gathers and scatters, and reductions by TMA. `mbarrier.try_wait` waits without a limit; setmaxnreg, griddepcontrol and
prefetches do nothing. Not detected: races for global memory, concurrent use of accumulators of different shapes, and
waits between threads of one warp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tvmconv.arithmetic import round_up
from tvmconv.compiler.tir_nodes import collect_nodes
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
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

    from tvmconv.compiler.executable import LaunchConfig

MAX_LANES = 1 << 15  # number of lanes that are executed together
MAX_SHARED_BYTES = 1 << 26  # shared memory of the blocks that are executed together


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
        function: Lowered device function.
        launch: Grid, block and cluster size.
        arrays: Arguments of the function: arrays, and arrays behind tensor maps (`arguments`).
        blocks: Indices of the blocks to run as (x, y, z), extended to whole clusters; all blocks by default.
        observer: Observer that is notified of accesses and operations.
        check_races: Whether to compute values and check for races. If not, `observer` is still notified of accesses,
            and arrays do not change.

    Raises:
        ExecutionError: The function behaves illegally.
        AnalysisError: The function has an unsupported construct.
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
    """Run blocks together, in lock step if possible, else by warpgroups or warps that wait for each other."""
    from tvm.ir import Call

    global_arrays = [argument.array if isinstance(argument, TensorMapArray) else argument for argument in arrays]
    op_names = {str(call.op.name) for call in collect_nodes(function.body, Call)}
    has_synchronization = any("mbarrier" in name or "bar_" in name or "cluster" in name for name in op_names)
    initial_bytes = [array.raw_bytes.copy() for array in global_arrays] if has_synchronization and check_races else []
    uses_wgmma = any("wgmma" in name for name in op_names)
    memory_class = SharedMemory if check_races else UncheckedSharedMemory
    for lockstep_lanes in (None, WARPGROUP_SIZE, WARP_SIZE) if has_synchronization else (None,):
        active_observer = observer
        if observer is not None and has_synchronization and not observer.immediate:
            active_observer = EventRecorder(observer)
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
            for array, initial in zip(global_arrays, initial_bytes, strict=False):  # empty without race checks
                array.raw_bytes[:] = initial
            continue
        if check_races:
            state.mbarriers.check_block_exit()
            state.shared.check_block_exit()
        if isinstance(active_observer, EventRecorder):
            active_observer.replay()
        return
