"""What is counted from a kernel's code beside what a profiler counted of it: sectors, requests and wavefronts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvmconv.analysis.banks import shared_accesses
from tvmconv.analysis.coalescing import global_accesses
from tvmconv.errors import Error
from tvmconv.kernel import Kernel
from tvmconv.reports.tables import NOTHING, significant

KINDS = ("load", "store")
_COUNTERS = (("global", "sectors"), ("global", "requests"), ("shared", "wavefronts"))
WHAT = tuple(f"{name}, {kind}s" for name in ("sectors", "requests", "wavefronts") for kind in KINDS)


def read_counters(file: Path) -> tuple[str, list[dict[str, Any]]]:
    """The provenance and the kernels of a file `NAME-counters.json`; raises Error if it is none."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        kernels = told["kernels"]
        for each in kernels:
            _ = each["workload"] + each["schedule"], each["metrics"].items()
        return str(told["provenance"]), kernels
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Error(f"{file}: no counters ({type(error).__name__}: {error})") from error


def counted(kernel: Kernel) -> dict[str, float]:
    """What a profiler would count of the first step, by `WHAT`: the middle block times the number of blocks."""
    blocks = math.prod(kernel.launch.grid)
    found, own = global_accesses(kernel), shared_accesses(kernel)
    numbers = [
        *(blocks * sum(each.sectors for each in found if each.kind == kind) for kind in KINDS),
        *(blocks * sum(each.requests for each in found if each.kind == kind) for kind in KINDS),
        *(blocks * sum(each.wavefronts for each in own if each.kind == kind) for kind in KINDS),
    ]
    return dict(zip(WHAT, numbers, strict=True))


def measured(metrics: Mapping[str, float]) -> dict[str, float]:
    """What a profiler counted, by `WHAT`; 0 for what it has not."""
    names = [f"{place}_{kind}_{what}" for place, what in _COUNTERS for kind in KINDS]
    return {what: float(metrics.get(name, 0)) for what, name in zip(WHAT, names, strict=True)}


def share(count: float, measure: float) -> str:
    """Counted over measured; a dash where nothing was measured."""
    return significant(count / measure) if measure else NOTHING
