"""Execution of lowered device functions with NumPy, without a GPU and with stricter checks than one.

All threads of a block, and many blocks at once, run in lock step: a value is a number, or an array with one element per
lane. `execute` runs one device function on arrays and changes them. Illegal behavior raises `ExecutionError`: accesses
out of bounds, misaligned vectors, races for shared memory, barriers that not all threads reach, and integer registers
that are read before they are written. Unwritten memory is NaN.

The two sides of a branch run in turns as fibers if threads wait in them at barriers or mbarriers
(`synchronization.fibers`). If lock step itself prevents progress, everything is executed again with each warpgroup in
lock step, and then with each warp, except warpgroups that execute wgmma. If no thread can continue even so, a
`DeadlockError` lists the waiting threads and their barriers. Tensor maps are passed as `TensorMapArray`.

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
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.compiler.tir_nodes import collect_nodes, count_elements
from tvmconv.emulator.errors import DeadlockError
from tvmconv.emulator.memory.arrays import Argument, GlobalArray, TensorMapArray
from tvmconv.emulator.memory.shared_memory import SharedMemory, UncheckedSharedMemory
from tvmconv.emulator.observers import AccessObserver, ForwardingObserver
from tvmconv.emulator.state import EmulatorState
from tvmconv.emulator.threads import BlockIndex, EmulatedThreads, expand_to_clusters
from tvmconv.emulator.translation.accesses import SharedMemoryLayout, plan_shared_memory
from tvmconv.emulator.translation.statements import StatementTranslator
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE
from tvmconv.workloads.dtypes import get_numpy_dtype

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc


def bind_arguments(lowered_kernel: LoweredKernel, arrays: Sequence[GlobalArray]) -> list[Argument]:
    """Return the arguments of a device kernel, from the arrays that `LoweredKernel.arguments` indexes."""
    return _apply_tensor_maps(lowered_kernel, [arrays[index] for index in lowered_kernel.arguments])


def _apply_tensor_maps(lowered_kernel: LoweredKernel, arguments: Sequence[GlobalArray]) -> list[Argument]:
    tensor_maps = dict(lowered_kernel.tensor_maps)
    return [
        TensorMapArray(array, tensor_maps[position]) if position in tensor_maps else array
        for position, array in enumerate(arguments)
    ]


def make_zero_arguments(lowered_kernel: LoweredKernel) -> list[Argument]:
    """Return zero-filled arguments of a device kernel, of the sizes that its TIR and its tensor maps declare."""
    from tvm import tirx

    sizes: dict[Any, int] = {}
    for node in collect_nodes(lowered_kernel.function.body, tirx.DeclBuffer):
        sizes[node.data] = max(sizes.get(node.data, 0), count_elements(node.buffer))
    tensor_maps = dict(lowered_kernel.tensor_maps)
    arrays: dict[int, GlobalArray] = {}
    parameters = zip(lowered_kernel.parameters, lowered_kernel.function.params, strict=True)
    for position, (parameter, variable) in enumerate(parameters):
        dtype = get_numpy_dtype(parameter.dtype)
        size = sizes.get(variable, 0)
        if position in tensor_maps:
            size = ceil_div(tensor_maps[position].nbytes, dtype.itemsize)
        if parameter.index not in arrays or arrays[parameter.index].size < size:
            arrays[parameter.index] = GlobalArray.allocate_zeros(parameter.name, dtype, size)
    return _apply_tensor_maps(lowered_kernel, [arrays[index] for index in lowered_kernel.arguments])


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
    """Run the blocks of a lowered device function, all by default, extended to whole clusters, on arrays.

    The function changes the arrays. Without `check_races`, no values are computed and no races are found, but the
    observer is notified. ExecutionError is raised for illegal behavior, AnalysisError for an unsupported construct.
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
            active_observer = ForwardingObserver(observer, is_deferred=True)
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
        if isinstance(active_observer, ForwardingObserver):
            active_observer.replay()
        return


def run_with_observer(
    lowered_kernel: LoweredKernel, argument_names: Iterable[str], blocks: Sequence[BlockIndex], observer: AccessObserver
) -> None:
    """Execute some blocks of a device kernel on zeros and notify an observer.
    The arrays have the names of the kernel's arguments, as in `kernel.memory_scopes`, in the notifications. An
    AnalysisError is raised if the emulator cannot execute the device kernel.
    """
    arrays, names = make_zero_arguments(lowered_kernel), dict(enumerate(argument_names))
    for index, argument in zip(lowered_kernel.arguments, arrays, strict=True):
        array = argument.array if isinstance(argument, TensorMapArray) else argument
        array.name = names.get(index, array.name)
    execute(lowered_kernel.function, lowered_kernel.launch, arrays, blocks=blocks, observer=observer, check_races=False)
