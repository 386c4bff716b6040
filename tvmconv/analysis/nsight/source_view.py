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

_SECTORS, _TAGS, _WAVEFRONTS = "L2 Theoretical Sectors Global", "L1 Tag Requests Global", "L1 Wavefronts Shared"


@dataclass(frozen=True)
class Executed:
    """One instruction of a launch, of all warps.

    Attributes:
        text: as it is written, such as `@!P0 LDS.128 R4, [R2]`.
        times: that a warp executed it, also with no thread taking part.
        sectors: of global memory that it asked L2 for, had L1 nothing of them.
        tags: lines that L1 looked up for it.
        wavefronts: of shared memory.
    """

    text: str
    times: int
    sectors: int
    tags: int
    wavefronts: int


def parse(lines: Iterable[str]) -> list[list[Executed]]:
    """The instructions of each launch, in order.

    Raises:
        Error: it is no such CSV.
    """
    launches: list[list[Executed]] = []
    header: list[str] = []
    try:
        for row in csv.reader(lines):
            if row[:1] == ["Kernel Name"]:
                launches.append([])
                header = []
            elif row[:1] == ["Address"]:
                header = row
            elif header and row:
                launches[-1].append(_executed(dict(zip(header, row, strict=True))))
    except (ValueError, LookupError) as error:
        raise Error(f"this is no source view of ncu: {error}") from error
    return launches


def _executed(row: dict[str, str]) -> Executed:
    def number(column: str) -> int:
        cell = row.get(column, "0").replace(",", "")
        return int(cell) if cell not in ("", "-") else 0

    return Executed(
        text=" ".join(row["Source"].split()),
        times=number("Instructions Executed"),
        sectors=number(_SECTORS),
        tags=number(_TAGS),
        wavefronts=number(_WAVEFRONTS),
    )
