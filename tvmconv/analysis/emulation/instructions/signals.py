"""Instructions by which threads wait for each other: mbarriers, barriers of blocks and clusters, fences.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.analysis.emulation.compiled import Compiler, Run, Statement, Waiting
from tvmconv.analysis.emulation.instructions.operands import Call, Destinations, address_of, nothing, same
from tvmconv.analysis.emulation.machine import Mask
from tvmconv.analysis.emulation.memory.shared import Address
from tvmconv.analysis.emulation.synchronization.meetings import CLUSTER
from tvmconv.analysis.emulation.threads import Lanes
from tvmconv.errors import AnalysisError
from tvmconv.gpu import WARPGROUP

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.synchronization.strands import Wait


# --- mbarriers ---


def _addressed(call: Call, compiler: Compiler, at: int = 0) -> Callable[[Mask], tuple[Lanes, Address]]:
    """The lanes of a mask, and where an operand of each points to."""
    machine, code = compiler.machine, compiler.code(call.operands[at])

    def addressed(mask: Mask) -> tuple[Lanes, Address]:
        lanes = machine.lanes(mask)
        return lanes, address_of(call, machine.decided(code, mask), machine, lanes)

    return addressed


def init(call: Call, compiler: Compiler) -> Run:
    """mbarrier.init.shared.b64 address, count."""
    addressed, count, machine = _addressed(call, compiler), compiler.code(call.operands[1]), compiler.machine

    def run(mask: Mask) -> None:
        lanes, where = addressed(mask)
        machine.mbarriers.make(where, lanes, machine.rows(machine.decided(count, mask), lanes))

    return run


def inval(call: Call, compiler: Compiler) -> Run:
    """mbarrier.inval.shared.b64 address."""
    addressed, machine = _addressed(call, compiler), compiler.machine

    def run(mask: Mask) -> None:
        lanes, where = addressed(mask)
        machine.mbarriers.end(where, lanes)

    return run


def _told(call: Call, compiler: Compiler, *, arrives: bool, bytes_: bool) -> Run:
    addressed, machine = _addressed(call, compiler), compiler.machine
    number = compiler.code(call.operands[1]) if len(call.operands) > 1 else (lambda mask: 1)

    def run(mask: Mask) -> None:
        lanes, where = addressed(mask)
        numbers = machine.rows(machine.decided(number, mask), lanes).tolist()
        barriers = machine.mbarriers
        for barrier, lane, n in zip(barriers.find(where, lanes), lanes.tolist(), numbers, strict=True):
            if arrives:
                barriers.arrive(barrier, lane, *((1, n) if bytes_ else (n,)))
            else:
                barriers.expect(barrier, n)

    return run


def arrive(call: Call, compiler: Compiler) -> Run:
    """mbarrier.arrive.shared.b64 address, count; at another block's, of an address from mapa."""
    return _told(call, compiler, arrives=True, bytes_=False)


def arrive_expect(call: Call, compiler: Compiler) -> Run:
    """mbarrier.arrive.expect_tx.shared.b64 address, bytes."""
    return _told(call, compiler, arrives=True, bytes_=True)


def expect(call: Call, compiler: Compiler) -> Run:
    """mbarrier.expect_tx.relaxed.cta.shared.b64 address, bytes."""
    return _told(call, compiler, arrives=False, bytes_=True)


def try_wait(call: Call, compiler: Compiler) -> Statement:
    """mbarrier.try_wait.parity.shared.b64 done, address, parity: taken to wait as long as it takes."""
    destinations, addressed = Destinations(call.operands[:1], compiler), _addressed(call, compiler, 1)
    parity, machine = compiler.code(call.operands[2]), compiler.machine

    def run(mask: Mask) -> Iterator[Wait]:
        lanes, where = addressed(mask)
        yield from machine.mbarriers.wait(where, lanes, machine.rows(machine.decided(parity, mask), lanes))
        destinations.write(mask, lanes, np.ones((len(lanes), 1), np.uint8), loaded=False)

    return Waiting(run)


def wait(node: Any, compiler: Compiler) -> Statement:
    """TVM's helper that tries until a phase is complete: of (address, parity)."""
    machine = compiler.machine
    address, parity = compiler.code(node.args[0]), compiler.code(node.args[1])
    call = Call("mbarrier_wait", (), None, ("shared",))

    def run(mask: Mask) -> Iterator[Wait]:
        lanes = machine.lanes(mask)
        where = address_of(call, machine.decided(address, mask), machine, lanes)
        yield from machine.mbarriers.wait(where, lanes, machine.rows(machine.decided(parity, mask), lanes))

    return Waiting(run)


def fence_init(call: Call, compiler: Compiler) -> Run:
    """fence.mbarrier_init.release.cluster."""
    machine = compiler.machine
    return lambda mask: machine.mbarriers.fence(machine.lanes(mask))


def fence_proxy(call: Call, compiler: Compiler) -> Run:
    """fence.proxy.async: what was written can be read by TMA and wgmma."""
    if "async" not in call.modifiers:
        raise AnalysisError(f"{call}, which cannot be executed")
    machine = compiler.machine

    def run(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        machine.clocks.fence(lanes)
        machine.mbarriers.fence(lanes)

    return run


# --- barriers ---


def block_sync(call: Call, compiler: Compiler) -> Statement:
    """bar.sync number{, threads}."""
    machine = compiler.machine
    number = compiler.code(call.operands[0])
    count = compiler.code(call.operands[1]) if len(call.operands) > 1 else None

    def run(mask: Mask) -> Iterator[Wait]:
        lanes = machine.lanes(mask)
        which = machine.rows(machine.decided(number, mask), lanes)
        return machine.meetings.sync(lanes, which, same(count(mask), lanes) if count is not None else None)

    return Waiting(run)


def block_arrive(call: Call, compiler: Compiler) -> Run:
    """bar.arrive number, threads."""
    machine = compiler.machine
    number, count = compiler.code(call.operands[0]), compiler.code(call.operands[1])

    def run(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        which = machine.rows(machine.decided(number, mask), lanes)
        machine.meetings.arrive(lanes, which, same(count(mask), lanes))

    return run


def warp_sync(call: Call, compiler: Compiler) -> Run:
    """bar.warp.sync."""
    return compiler.machine.meet_warps


def cluster_arrive(call: Call, compiler: Compiler) -> Run:
    """barrier.cluster.arrive."""
    machine = compiler.machine
    return lambda mask: machine.meetings.arrive(machine.lanes(mask), CLUSTER)


def cluster_wait(call: Call, compiler: Compiler) -> Statement:
    """barrier.cluster.wait."""
    machine = compiler.machine
    return Waiting(lambda mask: machine.meetings.wait_cluster(machine.lanes(mask)))


INSTRUCTIONS: dict[str, Callable[[Call, Compiler], Statement]] = {
    "mbarrier_init": init,
    "mbarrier_inval": inval,
    "mbarrier_arrive": arrive,
    "mbarrier_arrive_nocount": arrive,
    "mbarrier_arrive_expect_tx": arrive_expect,
    "mbarrier_expect_tx": expect,
    "mbarrier_try_wait_parity": try_wait,
    "mbarrier_try_wait_parity_no_hint": try_wait,
    "fence_mbarrier_init": fence_init,
    "fence_proxy": fence_proxy,
    "fence": nothing,
    "bar_sync": block_sync,
    "bar_sync_count": block_sync,
    "bar_arrive": block_arrive,
    "barrier_sync": block_sync,
    "barrier_sync_count": block_sync,
    "barrier_arrive": block_arrive,
    "bar_warp_sync": warp_sync,
    "barrier_cluster_arrive": cluster_arrive,
    "barrier_cluster_wait": cluster_wait,
    "setmaxnreg": nothing,
    "griddepcontrol": nothing,
    "prefetch": nothing,
}


def helper(node: Any, compiler: Compiler) -> Statement | None:
    """What executes a call of one of TVM's own helpers; None if it is none of those."""
    machine = compiler.machine
    whole = Waiting(lambda mask: machine.meetings.sync(machine.lanes(mask)))
    match str(node.op.name).removeprefix("tirx."):
        case "cuda.mbarrier_wait" | "cuda.mbarrier_wait_acquire_cluster":
            return wait(node, compiler)
        case "cuda.cta_sync":
            return whole
        case "cuda.warp_sync":
            return machine.meet_warps
        case "cuda.cluster_sync":
            return Waiting(lambda mask: machine.meetings.sync(machine.lanes(mask), CLUSTER))
        case "cuda.warpgroup_sync":
            number = compiler.code(node.args[0])
            return Waiting(
                lambda mask: machine.meetings.sync(
                    machine.lanes(mask), same(number(mask), machine.lanes(mask)), WARPGROUP
                )
            )
        case "tvm_storage_sync":
            return machine.meet_warps if str(node.args[0].value) == "warp" else whole
    return None
