"""Whole networks inside PyTorch, side by side: the results of `tvmconv bench torch-models`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tvmconv.reports.tables import NOTHING, Table, significant

THEIRS, OURS, COMPILED, AGAIN = "PyTorch", "tvmconv", "compiled", "from the log"


def torch_models(results: Sequence[Mapping[str, Any]]) -> Table:
    """One line a network, and the geometric mean last.

    Args:
        results: of networks, as the script writes them.

    Raises:
        KeyError: they are not of that script.
    """
    lines, shares = [], []
    for result in sorted(results, key=lambda each: (each["network"], each["batch"], each["dtype"])):
        timed = {each["name"]: each for each in result["timed"]}
        theirs, ours = _least(timed, THEIRS, compiled=False), _least(timed, OURS, compiled=False)
        compiled = _least(timed, THEIRS, compiled=True), _least(timed, OURS, compiled=True)
        share = min(ours, compiled[1]) / min(theirs, compiled[0])
        shares.append(share)
        again = timed.get(f"{OURS}, {AGAIN}")
        lines.append(
            (
                result["network"],
                result["dtype"],
                str(result["batch"]),
                *(significant(seconds * 1e6) for seconds in (theirs, compiled[0], ours, compiled[1])),
                significant(share),
                significant(timed[OURS]["made"]),
                significant(again["made"]) if again else NOTHING,
                f"{timed[THEIRS]['error']:.1e}",
                f"{timed[OURS]['error']:.1e}",
            )
        )
    if shares:
        mean = significant(statistics.geometric_mean(shares))
        lines.append(("geometric mean", *(NOTHING,) * 6, mean, *(NOTHING,) * 4))
    headers = ("network", "dtype", "batch", "PyTorch [µs]", "compiled [µs]", "tvmconv [µs]", "compiled [µs] ")
    more = ("time ×", "made in [s]", "again in [s]", "error, PyTorch", "error, tvmconv")
    return Table((*headers, *more), lines, left=frozenset({"network", "dtype"}))


def _least(timed: Mapping[str, Mapping[str, Any]], whose: str, *, compiled: bool) -> float:
    """The least time in a CUDA graph of one's ways to run a network."""
    own = [each for name, each in timed.items() if name.startswith(whose) and (COMPILED in name) == compiled]
    return min((float(each["graph"]) for each in own), default=float("inf"))
