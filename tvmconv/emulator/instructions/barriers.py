"""Synchronization instructions: mbarriers, barriers of blocks and clusters, and fences.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.emulator.instructions.operands import (
    DestinationOperands,
    PtxCall,
    require_uniform,
    resolve_address,
    translate_no_op,
)
from tvmconv.emulator.lane_code import CompiledStatement, StatementCode, SuspendableStatement, TirTranslator
from tvmconv.emulator.memory.shared_memory import MemoryAddress
from tvmconv.emulator.state import Mask
from tvmconv.emulator.synchronization.barriers import CLUSTER_BARRIER
from tvmconv.emulator.threads import Lanes
from tvmconv.errors import AnalysisError
from tvmconv.target import WARPGROUP_SIZE

if TYPE_CHECKING:
    from tvmconv.emulator.synchronization.fibers import WaitCondition


# --- mbarriers ---


def _resolve_operand_address(
    call: PtxCall, translator: TirTranslator, operand_index: int = 0
) -> Callable[[Mask], tuple[Lanes, MemoryAddress]]:
    """Return a function that evaluates the active lanes of a mask and the address of an operand in each of them."""
    state, code = translator.state, translator.translate_expression(call.operands[operand_index])

    def resolve(mask: Mask) -> tuple[Lanes, MemoryAddress]:
        lanes = state.find_lanes(mask)
        return lanes, resolve_address(call, state.evaluate_data_independent(code, mask), state, lanes)

    return resolve


def translate_init(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """mbarrier.init.shared.b64 address, count."""
    resolve, state = _resolve_operand_address(call, translator), translator.state
    count_code = translator.translate_expression(call.operands[1])

    def run(mask: Mask) -> None:
        lanes, location = resolve(mask)
        state.mbarriers.initialize(location, lanes, state.evaluate_lanes(count_code, mask, lanes))

    return run


def translate_inval(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """mbarrier.inval.shared.b64 address."""
    resolve, state = _resolve_operand_address(call, translator), translator.state

    def run(mask: Mask) -> None:
        lanes, location = resolve(mask)
        state.mbarriers.invalidate(location, lanes)

    return run


def _translate_arrival(call: PtxCall, translator: TirTranslator, *, arrives: bool, expects_tx: bool) -> StatementCode:
    resolve, state = _resolve_operand_address(call, translator), translator.state
    count_code = translator.translate_expression(call.operands[1]) if len(call.operands) > 1 else (lambda mask: 1)

    def run(mask: Mask) -> None:
        lanes, location = resolve(mask)
        counts = state.evaluate_lanes(count_code, mask, lanes).tolist()
        barriers = state.mbarriers
        for barrier, lane, count in zip(barriers.find_mbarriers(location, lanes), lanes.tolist(), counts, strict=True):
            if arrives:
                barriers.arrive(barrier, lane, *((1, count) if expects_tx else (count,)))
            else:
                barriers.expect_tx(barrier, count)

    return run


def translate_arrive(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """mbarrier.arrive.shared.b64 address, count; an address from mapa is in another block of the cluster."""
    return _translate_arrival(call, translator, arrives=True, expects_tx=False)


def translate_arrive_expect_tx(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """mbarrier.arrive.expect_tx.shared.b64 address, bytes."""
    return _translate_arrival(call, translator, arrives=True, expects_tx=True)


def translate_expect_tx(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """mbarrier.expect_tx.relaxed.cta.shared.b64 address, bytes."""
    return _translate_arrival(call, translator, arrives=False, expects_tx=True)


def translate_try_wait(call: PtxCall, translator: TirTranslator) -> CompiledStatement:
    """mbarrier.try_wait.parity.shared.b64 done, address, parity: waits without a time limit."""
    destinations = DestinationOperands(call.operands[:1], translator)
    resolve = _resolve_operand_address(call, translator, 1)
    parity, state = translator.translate_expression(call.operands[2]), translator.state

    def run(mask: Mask) -> Iterator[WaitCondition]:
        lanes, location = resolve(mask)
        yield from state.mbarriers.wait_parity(location, lanes, state.evaluate_lanes(parity, mask, lanes))
        destinations.write(mask, lanes, np.ones((len(lanes), 1), np.uint8), depends_on_memory=False)

    return SuspendableStatement(run)


def translate_wait(node: Any, translator: TirTranslator) -> CompiledStatement:
    """TVM's helper that waits for the phase of a parity, with arguments (address, parity)."""
    state = translator.state
    address, parity = translator.translate_expression(node.args[0]), translator.translate_expression(node.args[1])
    call = PtxCall("mbarrier_wait", (), None, ("shared",))

    def run(mask: Mask) -> Iterator[WaitCondition]:
        lanes = state.find_lanes(mask)
        location = resolve_address(call, state.evaluate_data_independent(address, mask), state, lanes)
        yield from state.mbarriers.wait_parity(location, lanes, state.evaluate_lanes(parity, mask, lanes))

    return SuspendableStatement(run)


def translate_fence_init(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """fence.mbarrier_init.release.cluster."""
    state = translator.state
    return lambda mask: state.mbarriers.fence_init(state.find_lanes(mask))


def translate_fence_proxy(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """fence.proxy.async: makes earlier writes visible to TMA and wgmma."""
    if "async" not in call.modifiers:
        raise AnalysisError(f"{call} is not supported by the emulator")
    state = translator.state

    def run(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        state.clocks.fence_async_proxy(lanes)
        state.mbarriers.fence_init(lanes)

    return run


# --- barriers ---


def translate_bar_sync(call: PtxCall, translator: TirTranslator) -> CompiledStatement:
    """bar.sync number{, threads}."""
    state = translator.state
    number = translator.translate_expression(call.operands[0])
    count = translator.translate_expression(call.operands[1]) if len(call.operands) > 1 else None

    def run(mask: Mask) -> Iterator[WaitCondition]:
        lanes = state.find_lanes(mask)
        num_threads = require_uniform(count(mask), lanes) if count is not None else None
        return state.barriers.sync(lanes, state.evaluate_lanes(number, mask, lanes), num_threads)

    return SuspendableStatement(run)


def translate_bar_arrive(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """bar.arrive number, threads."""
    state = translator.state
    number, count = translator.translate_expression(call.operands[0]), translator.translate_expression(call.operands[1])

    def run(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        barrier_indices = state.evaluate_lanes(number, mask, lanes)
        state.barriers.arrive(lanes, barrier_indices, require_uniform(count(mask), lanes))

    return run


def translate_warp_sync(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """bar.warp.sync."""
    return translator.state.sync_warps


def translate_cluster_arrive(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """barrier.cluster.arrive."""
    state = translator.state
    return lambda mask: state.barriers.arrive(state.find_lanes(mask), CLUSTER_BARRIER)


def translate_cluster_wait(call: PtxCall, translator: TirTranslator) -> CompiledStatement:
    """barrier.cluster.wait."""
    state = translator.state
    return SuspendableStatement(lambda mask: state.barriers.wait_cluster(state.find_lanes(mask)))


INSTRUCTIONS: dict[str, Callable[[PtxCall, TirTranslator], CompiledStatement]] = {
    "mbarrier_init": translate_init,
    "mbarrier_inval": translate_inval,
    "mbarrier_arrive": translate_arrive,
    "mbarrier_arrive_nocount": translate_arrive,
    "mbarrier_arrive_expect_tx": translate_arrive_expect_tx,
    "mbarrier_expect_tx": translate_expect_tx,
    "mbarrier_try_wait_parity": translate_try_wait,
    "mbarrier_try_wait_parity_no_hint": translate_try_wait,
    "fence_mbarrier_init": translate_fence_init,
    "fence_proxy": translate_fence_proxy,
    "fence": translate_no_op,
    "bar_sync": translate_bar_sync,
    "bar_sync_count": translate_bar_sync,
    "bar_arrive": translate_bar_arrive,
    "barrier_sync": translate_bar_sync,
    "barrier_sync_count": translate_bar_sync,
    "barrier_arrive": translate_bar_arrive,
    "bar_warp_sync": translate_warp_sync,
    "barrier_cluster_arrive": translate_cluster_arrive,
    "barrier_cluster_wait": translate_cluster_wait,
    "setmaxnreg": translate_no_op,
    "griddepcontrol": translate_no_op,
    "prefetch": translate_no_op,
}


def translate_helper(node: Any, translator: TirTranslator) -> CompiledStatement | None:
    """Return the code of a call of one of TVM's own helpers, or None for other calls."""
    state = translator.state
    sync_block = SuspendableStatement(lambda mask: state.barriers.sync(state.find_lanes(mask)))
    match str(node.op.name).removeprefix("tirx."):
        case "cuda.mbarrier_wait" | "cuda.mbarrier_wait_acquire_cluster":
            return translate_wait(node, translator)
        case "cuda.cta_sync":
            return sync_block
        case "cuda.warp_sync":
            return state.sync_warps
        case "cuda.cluster_sync":
            return SuspendableStatement(lambda mask: state.barriers.sync(state.find_lanes(mask), CLUSTER_BARRIER))
        case "cuda.warpgroup_sync":
            number = translator.translate_expression(node.args[0])

            def sync_warpgroup(mask: Mask) -> Iterator[WaitCondition]:
                lanes = state.find_lanes(mask)
                return state.barriers.sync(lanes, require_uniform(number(mask), lanes), WARPGROUP_SIZE)

            return SuspendableStatement(sync_warpgroup)
        case "tvm_storage_sync":
            return state.sync_warps if str(node.args[0].value) == "warp" else sync_block
    return None
