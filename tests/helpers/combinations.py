"""Convolutions of every dtype, layout and epilogue: all combinations, or few in which every two choices meet."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from nasty import NASTY_1D, NASTY_2D, NASTY_3D, NASTY_DEPTHWISE, NASTY_GROUPED, NASTY_WINOGRAD

import tvmconv as tc

EPILOGUES = ("", "bias", "bias,relu", "bias,add,silu", "gelu", "clamp")
LAYOUTS = ("nchw", "nhwc")
DTYPES = ("f32", "f16", "bf16")
LISTS = {"conv1d": NASTY_1D, "conv2d": NASTY_2D, "conv3d": NASTY_3D}
OWN_LISTS = dict.fromkeys(("depthwise", "depthwise_nhwc", "depthwise_nchw"), NASTY_DEPTHWISE)
OWN_LISTS |= dict.fromkeys(("grouped_nhwc", "grouped_nchw"), NASTY_GROUPED)
OWN_LISTS |= {"winograd": NASTY_WINOGRAD[::3], "winograd_fused": NASTY_WINOGRAD[1::3]}  # test_winograd.py has all


class Case(NamedTuple):
    """A schedule and what it computes; `text` is of a float32 workload in nchw without an epilogue."""

    operator: str
    schedule: str
    text: str
    dtype: str
    layout: str
    epilogue: str

    @property
    def workload(self) -> tc.workloads.Workload:
        return tc.parse(",".join(filter(None, (self.text, self.dtype, self.layout, self.epilogue))))

    def __str__(self) -> str:
        return f"{self.workload}-{self.schedule}"


def schedules() -> list[tuple[str, str, Sequence[str]]]:
    """Operator and name of every schedule of convolutions, and the nasty workloads that it is to compute.

    Those that are for CUDA alone or for integers alone, with dtypes of their own, have tests of their own.
    """
    return [
        (s.operator, s.name, [text for text in OWN_LISTS.get(s.name, LISTS[s.operator]) if text.startswith(s.operator)])
        for s in tc.schedules()
        if s.operator in LISTS and "opencl" in s.device_kinds and "float32" in s.dtypes
    ]


def layouts(schedule: str) -> Sequence[str]:
    """The layouts that a schedule computes."""
    return next(((layout,) for layout in LAYOUTS if schedule.endswith(f"_{layout}")), LAYOUTS)


def every(dtypes: Sequence[str]) -> list[Case]:
    """All combinations."""
    return [
        Case(operator, name, *choice)
        for operator, name, texts in schedules()
        for choice in itertools.product(texts, dtypes, layouts(name), EPILOGUES)
    ]


def in_pairs(dtypes: Sequence[str]) -> list[Case]:
    """The fewest that a greedy choice finds in which every two choices meet, but for epilogues and workloads.

    A schedule meets every workload, and every dtype in every layout that it computes.
    """
    met_by: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in every(dtypes):
        for meeting in _meetings(case):
            met_by[meeting].append(case)
    missing = dict.fromkeys(every(dtypes), 0) | Counter(case for cases in met_by.values() for case in cases)
    chosen = []
    while any(missing.values()):
        best = max(missing, key=missing.__getitem__)
        chosen.append(best)
        for meeting in _meetings(best):
            missing |= {case: missing[case] - 1 for case in met_by.pop(meeting, ())}
    return sorted(chosen)


def _meetings(case: Case) -> set[tuple[str, ...]]:
    operator, schedule, text, dtype, layout, epilogue = case
    own = (operator, schedule)
    return {
        (*own, text),
        (*own, dtype, layout),
        (*own, epilogue),
        (text, dtype),
        (text, layout),
        (operator, epilogue, dtype),
        (operator, epilogue, layout),
    }


def in_turn(cases: Sequence[Case]) -> list[Case]:
    """Those of some cases with which each schedule meets every third workload, and all dtypes, layouts and epilogues.

    Schedules of an operator begin with the first, the second and the third workload in turn, so that all are computed;
    a workload that at most two schedules compute is there in any case.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        own = names.setdefault((case.operator, case.schedule), [])
        if case.text not in own:
            own.append(case.text)
    computed = Counter((operator, text) for (operator, _), own in names.items() for text in own)
    met: set[tuple[object, ...]] = set()
    found = []
    for case in cases:
        key = case.operator, case.schedule
        choices = {("epilogue", case.epilogue), ("type", case.dtype, case.layout)}
        new = {(*key, *choice) for choice in choices} - met
        turn = (list(names).index(key) + names[key].index(case.text)) % 3
        if turn == 0 or new or computed[case.operator, case.text] < 3:
            met |= new
            found.append(case)
    return found
