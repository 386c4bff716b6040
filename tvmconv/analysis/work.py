"""What a step of a kernel has to do, as the few numbers from which its time is predicted."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.analysis.counts import counts
from tvmconv.analysis.lowered.tir import has_instructions
from tvmconv.analysis.machine_code.operations import code, instructions
from tvmconv.analysis.machine_code.runs import of_a_thread
from tvmconv.analysis.machine_code.trips import find_trips
from tvmconv.analysis.machine_code.warp import Warp
from tvmconv.analysis.memory.banks import SharedAccess, shared_accesses
from tvmconv.analysis.memory.coalescing import SECTOR_BYTES, GlobalAccess
from tvmconv.analysis.memory.footprint import Footprints, footprints, step_bytes
from tvmconv.analysis.occupancy import occupancy_of
from tvmconv.errors import AnalysisError
from tvmconv.gpu import WARP, l1_bytes, l2_bytes

if TYPE_CHECKING:
    from tvmconv.compiler.lower import LoweredStep
    from tvmconv.kernel import Kernel

# Integer arithmetic has half the lanes of float32: "Arithmetic Instructions" in the CUDA C++ Programming Guide.
_INTEGER = frozenset(
    [
        *("IMAD", "LEA", "IADD3", "VIADD", "SHF", "LOP3", "PRMT", "SEL", "IABS", "VIADDMNMX", "IDP"),
        *("ISETP", "PLOP3", "P2R", "FSEL", "FMNMX"),
    ]
)
_FLOAT = frozenset(["FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2"])
_SHARED_LOADS, _SHARED_STORES = ("LDS", "LDSM"), ("STS", "STSM", "LDGSTS")
_BULK = ("UTMALDG", "UTMASTG", "UBLKCP", "HGMMA")  # what TMA and wgmma do is not of a warp's making


@dataclass(frozen=True)
class Work:
    """What a step does, in one block where nothing else is said.

    Attributes:
        blocks: of the grid.
        resident: blocks that a multiprocessor holds at a time.
        alone: clocks that one warp would take by itself.
        issued: instructions, of all warps.
        floats: of these, float32 and float16 arithmetic.
        integers: of these, integer arithmetic.
        matrices: of these, multiplications of matrices.
        wavefronts: of shared memory.
        spilled: wavefronts of local memory.
        lines: that L1 looks up, of 128 bytes.
        l1_sectors: that L1 moves.
        l2_sectors: that come from L2 and go there.
        dram_bytes: from memory and to it, of the whole grid; 0 where all arrays fit L2.
    """

    blocks: int
    resident: int
    alone: float
    issued: float
    floats: float
    integers: float
    matrices: float
    wavefronts: float
    spilled: float
    lines: float
    l1_sectors: float
    l2_sectors: float
    dram_bytes: int

    def numbers(self) -> dict[str, float]:
        """By name, rounded to whole ones, as a file keeps them."""
        return {name: round(value) for name, value in asdict(self).items()}


def work(kernel: Kernel) -> list[Work]:
    """What each timed step of a kernel does.

    Raises:
        AnalysisError: it cannot be counted, depends on the data, or is done by TMA and wgmma.
        CompileError: the kernel does not compile, or there is no nvdisasm.
    """
    return [_of_step(kernel, step, code(kernel.listings[step.name])) for step in kernel.timed_steps]


def _of_step(kernel: Kernel, step: LoweredStep, sass: Any) -> Work:
    found = occupancy_of(kernel, step)
    warps = -(-step.launch.threads // WARP)
    if any(each.name in _BULK for each, _ in instructions(sass)):
        raise AnalysisError("the time of what TMA and wgmma do is not predicted")
    done = counts(kernel, step)
    touched = done.touched
    own = done.shared if has_instructions(step.function) else shared_accesses(kernel, step)
    find_trips(sass, of_a_thread(step, done.done, touched))
    warp = Warp()
    warp.run(sass)
    if not found.blocks:
        raise AnalysisError(f"not one block fits on a multiprocessor: {', '.join(found.binding)}")

    def issued(names: Any) -> float:
        return warps * sum(warp.issued[name] for name in names)

    there = footprints(kernel, step)
    arch = str(kernel.device.arch)
    capacity = l2_bytes(arch)
    shared = kernel.cubin.kernels[step.name].shared_bytes + step.dynamic_shared_bytes
    return Work(
        blocks=math.prod(step.launch.grid),
        resident=found.blocks,
        alone=warp.clocks,
        issued=warps * sum(warp.issued.values()),
        floats=issued(_FLOAT),
        integers=issued(_INTEGER),
        matrices=issued(["HMMA"]),
        wavefronts=issued(_SHARED_LOADS) * _passes(own, "load") + issued(_SHARED_STORES) * _passes(own, "store"),
        spilled=issued(["LDL", "STL"]),
        lines=sum(each.lines for each in touched),
        l1_sectors=sum(each.sectors for each in touched),
        l2_sectors=_from_l2(touched, there, l1_bytes(arch) // found.blocks - shared),
        dram_bytes=0 if _all_bytes(kernel, there) <= capacity else step_bytes(kernel, step, there, capacity),
    )


def _passes(own: list[SharedAccess], kind: str) -> float:
    """Wavefronts of a request, on average.

    The compiler makes one wide access of several narrow ones. It takes no more passes than one of these did: a stride
    of two words is a conflict for loads of one word, and none for loads of two.
    """
    requests = sum(each.requests for each in own if each.kind == kind)
    return sum(each.wavefronts for each in own if each.kind == kind) / requests if requests else 1.0


def _from_l2(touched: list[GlobalAccess], there: Footprints | None, room: int) -> int:
    """Sectors that a block loads from L2, each once where they fit the block's part of L1, and those that it stores."""
    stored = sum(each.sectors for each in touched if each.kind == "store")
    loaded = sum(each.sectors for each in touched if each.kind == "load")
    if there is None:
        return stored + loaded
    distinct = sum(each.count for (kind, _), each in there.items() if kind == "load")
    return stored + (min(loaded, distinct) if distinct * SECTOR_BYTES <= room else loaded)


def _all_bytes(kernel: Kernel, there: Footprints | None) -> int:
    return sum(each.nbytes for each in there.values()) if there else kernel.workload.min_bytes
