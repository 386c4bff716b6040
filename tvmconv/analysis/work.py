"""What a step of a kernel has to do, as the few numbers from which its time is predicted.

All of it is what the machine code of the middle block does, which is executed for that
(`tvmconv.analysis.machine_code.executed`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tvmconv.analysis.asked import asked_by_machine_code
from tvmconv.analysis.machine_code.arithmetic import lane_clocks
from tvmconv.analysis.machine_code.executed.operations import words
from tvmconv.analysis.machine_code.operations import code
from tvmconv.analysis.machine_code.warp import Warp
from tvmconv.analysis.memory.coalescing import SECTOR_BYTES, GlobalAccess
from tvmconv.analysis.memory.footprint import Footprints, footprints, step_bytes
from tvmconv.analysis.occupancy import occupancy_of
from tvmconv.errors import AnalysisError
from tvmconv.gpu import l1_bytes, l2_bytes

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.kernel import Kernel

# Integer arithmetic has half the lanes of float32: "Arithmetic Instructions" in the CUDA C++ Programming Guide.
_INTEGER = frozenset(
    [
        *("IMAD", "LEA", "IADD3", "VIADD", "SHF", "LOP3", "PRMT", "SEL", "IABS", "VIADDMNMX", "IDP"),
        *("ISETP", "PLOP3", "P2R", "FSEL", "FMNMX"),
    ]
)
_LOCAL = ("LDL", "STL")
_BULK = ("UTMALDG", "UTMASTG", "UBLKCP", "HGMMA")  # what TMA and wgmma do is not of a warp's making


@dataclass(frozen=True)
class Work:
    """What a step does, in one block where nothing else is said.

    Attributes:
        blocks: of the grid.
        resident: blocks that a multiprocessor holds at a time.
        alone: clocks that one warp would take by itself.
        issued: instructions, of all warps.
        floats: clocks that their float32 and float16 arithmetic takes each of a warp's lanes.
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


def work(kernel: Kernel, most: int | None = None) -> list[Work]:
    """What each timed step of a kernel does.

    Args:
        kernel: for an NVIDIA architecture.
        most: number of instructions of a block that are executed at most; by default a million.

    Raises:
        AnalysisError: it cannot be counted, depends on the data, or is done by TMA and wgmma.
        CompileError: the kernel does not compile, or there is no nvdisasm.
    """
    return [_of_step(kernel, step, most) for step in kernel.timed_steps]


def _of_step(kernel: Kernel, step: LoweredStep, most: int | None) -> Work:
    found = occupancy_of(kernel, step)
    listing = kernel.listings[step.name]
    if any(each.opcode in _BULK for each in listing):
        raise AnalysisError("the time that TMA copies and wgmma instructions take is not modelled")
    if not found.blocks:
        raise AnalysisError(f"not one block fits on a multiprocessor: {', '.join(found.binding)}")
    asks = asked_by_machine_code(kernel, step, most)
    assert asks.executed is not None
    warp = Warp()
    warp.run(code(listing, [each.executed for _, each in asks.executed], [each.back for _, each in asks.executed]))
    issued: Counter[str] = Counter()
    for instruction, each in asks.executed:
        issued[instruction.opcode] += each.executed
    there = footprints(kernel, step)
    arch = str(kernel.device.arch)
    capacity = l2_bytes(arch)
    shared = kernel.cubin.kernels[step.name].shared_bytes + step.dynamic_shared_bytes
    return Work(
        blocks=math.prod(step.launch.grid),
        resident=found.blocks,
        alone=warp.clocks,
        issued=issued.total(),
        floats=sum(lane_clocks(instruction) * each.executed for instruction, each in asks.executed),
        integers=sum(issued[name] for name in _INTEGER),
        matrices=issued["HMMA"],
        wavefronts=sum(each.wavefronts for each in asks.shared),
        spilled=sum(words(line) * each.executed for line, each in asks.executed if line.opcode in _LOCAL),
        lines=sum(each.lines for each in asks.touched),
        l1_sectors=sum(each.sectors for each in asks.touched),
        l2_sectors=_from_l2(asks.touched, there, l1_bytes(arch) // found.blocks - shared),
        dram_bytes=0 if _all_bytes(kernel, there) <= capacity else step_bytes(kernel, step, there, capacity),
    )


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
