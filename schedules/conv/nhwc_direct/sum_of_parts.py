"""Second kernel of gradients of weights: it adds the partial sums of a workspace in an order that never changes.

On Hopper it may start before the first kernel ends, for which it waits (PTX ISA, "griddepcontrol").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from tvmconv.arithmetic import ceil_div
from tvmconv.target import WARP_SIZE
from tvmconv.workloads.dtypes import ACCUMULATOR

from ...tir_builder import allocate, emit_ptx, store, thread_axis, unrolled_loop
from .strip_thread import emit_guarded

MAX_CHAINS = 32  # threads that share the parts of a sum
PARTS_PER_CHAIN = 8


def emit_sum_of_parts(num_parts: int, num_sums: int, workspace: Any, store_result: Callable[[Any, Any], None]) -> None:
    """Emit the kernel that adds up a workspace (parts, sums): interleaved chains, then the chains in order.

    `store_result` emits the store of a sum from its number and value.
    """
    chains = 1
    while chains < MAX_CHAINS and chains * PARTS_PER_CHAIN <= num_parts:
        chains *= 2
    total = allocate("total", 1, ACCUMULATOR)
    shared = allocate("chain_sums", chains * WARP_SIZE, ACCUMULATOR, "shared") if chains > 1 else None
    with (
        thread_axis(ceil_div(num_sums, WARP_SIZE), "blockIdx.x") as block,
        thread_axis(chains, "threadIdx.y") as chain,
        thread_axis(WARP_SIZE, "threadIdx.x") as lane,
    ):
        emit_ptx("griddepcontrol.wait")
        emit_ptx("griddepcontrol.launch_dependents")
        number = block * WARP_SIZE + lane
        existing = number if num_sums % WARP_SIZE == 0 else tirx.min(number, num_sums - 1)
        store(total, 0, tirx.const(0, ACCUMULATOR))
        with unrolled_loop(ceil_div(num_parts, chains), "step") as step:
            part = step * chains + chain
            conditions = [part < num_parts] * (num_parts % chains > 0)
            emit_guarded(conditions, lambda: store(total, 0, total[0] + workspace[part * num_sums + existing]))
        conditions = [number < num_sums] * (num_sums % WARP_SIZE > 0)
        if shared is not None:
            store(shared, chain * WARP_SIZE + lane, total[0])
            conditions.append(chain == 0)

        def emit_result() -> None:
            if shared is not None:
                store(total, 0, tirx.const(0, ACCUMULATOR))
                with unrolled_loop(chains, "i") as i:
                    store(total, 0, total[0] + shared[i * WARP_SIZE + lane])
            store_result(number, total[0])

        emit_guarded(conditions, emit_result)
