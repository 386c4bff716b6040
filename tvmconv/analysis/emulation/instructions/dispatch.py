"""Which calls are GPU instructions, and what executes them: PTX as `T.ptx[...]` writes it, and TVM's own intrinsics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.analysis.emulation.compiled import Code, Compiler, Pointer, Statement, Waiting
from tvmconv.analysis.emulation.errors import ExecutionError
from tvmconv.analysis.emulation.instructions import (
    conversions,
    copies,
    intrinsics,
    matrices,
    mma,
    moves,
    shuffles,
    signals,
    tma,
    wgmma,
)
from tvmconv.analysis.emulation.instructions.operands import PTX, Call
from tvmconv.analysis.emulation.machine import Mask
from tvmconv.analysis.emulation.memory.shared import Shared
from tvmconv.errors import AnalysisError

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.synchronization.strands import Fork, Wait

_INSTRUCTIONS: dict[str, Callable[[Call, Compiler], Statement]] = {
    **moves.INSTRUCTIONS,
    **copies.INSTRUCTIONS,
    **matrices.INSTRUCTIONS,
    **mma.INSTRUCTIONS,
    **conversions.INSTRUCTIONS,
    **shuffles.INSTRUCTIONS,
    **signals.INSTRUCTIONS,
    **tma.INSTRUCTIONS,
    **wgmma.INSTRUCTIONS,
}


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
    if name in intrinsics.INTRINSICS:
        return intrinsics.INTRINSICS[name](node, compiler)
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
        return shuffles.elected(compiler.machine)
    if name.startswith("tirx.cuda.__shfl"):
        return shuffles.shuffled(node, compiler)
    return None
