"""Parser of Nsight Compute's source view: the executions and memory requests of each instruction of a launch.

The input is the output of `ncu --import REPORT --page source --csv` for a report with the section SourceCounters. Each
kernel begins with its name and a header of its own, because ncu leaves out columns that are empty for a kernel. The
instructions are in the order of the machine code. Columns: Nsight Compute, Kernel Profiling Guide, "Source Counters".
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass

from tvmconv.errors import Error

_SECTORS_COLUMN = "L2 Theoretical Sectors Global"
_TAGS_COLUMN = "L1 Tag Requests Global"
_WAVEFRONTS_COLUMN = "L1 Wavefronts Shared"


@dataclass(frozen=True)
class ProfiledInstruction:
    """Measured counts of one instruction of a launch, over all warps."""

    text: str  # text of the instruction, such as `@!P0 LDS.128 R4, [R2]`
    num_executed: int  # times that a warp executed it, including those with no active thread
    num_sectors: int  # sectors that it would request from L2 if L1 held none of them
    num_tags: int  # lines that L1 looked up for it
    num_wavefronts: int  # shared-memory wavefronts


def parse_source_view(lines: Iterable[str]) -> list[list[ProfiledInstruction]]:
    """Return the instructions of each launch in order."""
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
        raise Error(f"ncu's output cannot be parsed as its source view in CSV: {error}") from error
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
