"""Nsight Compute's source view as CSV: of each instruction of a launch how often it ran, and what it took of memory.

It is what `ncu --import REPORT --page source --csv` prints of a report with the section SourceCounters. Each kernel
begins with its name and a header of its own, as ncu leaves out columns in which a kernel has nothing. Instructions are
in the order of the machine code. Columns: Nsight Compute, Kernel Profiling Guide, "Source Counters".
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass

from tvmconv.errors import Error

_SECTORS_COLUMN, _TAGS_COLUMN, _WAVEFRONTS_COLUMN = (
    "L2 Theoretical Sectors Global",
    "L1 Tag Requests Global",
    "L1 Wavefronts Shared",
)


@dataclass(frozen=True)
class ProfiledInstruction:
    """One instruction of a launch, of all warps.

    Attributes:
        text: as it is written, such as `@!P0 LDS.128 R4, [R2]`.
        num_executed: that a warp executed it, also with no thread taking part.
        num_sectors: of global memory that it asked L2 for, had L1 nothing of them.
        num_tags: lines that L1 looked up for it.
        num_wavefronts: of shared memory.
    """

    text: str
    num_executed: int
    num_sectors: int
    num_tags: int
    num_wavefronts: int


def parse_source_view(lines: Iterable[str]) -> list[list[ProfiledInstruction]]:
    """The instructions of each launch, in order.

    Raises:
        Error: it is no such CSV.
    """
    launches: list[list[ProfiledInstruction]] = []
    header: list[str] = []
    try:
        for row in csv.reader(lines):
            if row[:1] == ["Kernel Name"]:
                launches.append([])
                header = []
            elif row[:1] == ["Address"]:
                header = row
            elif header and row:
                launches[-1].append(_parse_instruction(dict(zip(header, row, strict=True))))
    except (ValueError, LookupError) as error:
        raise Error(f"this is no source view of ncu: {error}") from error
    return launches


def _parse_instruction(row: dict[str, str]) -> ProfiledInstruction:
    def parse_cell(column: str) -> int:
        cell = row.get(column, "0").replace(",", "")
        return int(cell) if cell not in ("", "-") else 0

    return ProfiledInstruction(
        text=" ".join(row["Source"].split()),
        num_executed=parse_cell("Instructions Executed"),
        num_sectors=parse_cell(_SECTORS_COLUMN),
        num_tags=parse_cell(_TAGS_COLUMN),
        num_wavefronts=parse_cell(_WAVEFRONTS_COLUMN),
    )
