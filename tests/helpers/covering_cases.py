"""Few workloads that together have all features of many: sweeps run these, and `-m slow` runs the others."""

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

import tvmconv as tc


def list_features(text: str) -> set[Any]:
    """What the code for a convolution may depend on; the features of another workload are its text."""
    if not text.startswith("conv"):
        return {text}
    w = tc.parse(text)
    operator, channels_in, channels_out = text.partition(":")[0], w.C // w.groups, w.O // w.groups
    layouts, groups = (text.count("nchw"), text.count("nhwc")), (w.groups > 1, w.groups == w.C)
    strides, is_symmetric = (max(w.stride) > 1, len(set(w.stride)) > 1), w.pad_low == w.pad_high
    return {
        ("dtype and operator", w.dtype, operator),
        ("dtype and layout", w.dtype, layouts),
        ("dtype and stride", w.dtype, strides),
        ("dtype and groups", w.dtype, groups),
        ("operator and groups", operator, groups),
        ("operator and stride", operator, strides),
        ("epilogue", w.epilogue),
        ("padding", tuple(sorted(set(w.pad_low))), is_symmetric),
        ("taps", w.kernel),
        ("dilation", max(w.dilation) > 1),
        ("batch", w.N > 1),
        ("output size", tuple(size % 4 for size in w.output_size)),
        ("small output", min(w.output_size) <= 4),
        ("input channels", channels_in % 8 == 0, channels_in % 16 == 0),
        ("output channels", channels_out % 8 == 0, channels_out % 16 == 0),
    }


def mark_others_slow(cases: Sequence[Any], features: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """The cases; those without a feature that a greedy choice of few others lacks are marked as slow."""
    remaining = {number: set(features(case)) for number, case in enumerate(cases)}
    wanted, chosen = set().union(*remaining.values()), set()
    while wanted:
        best = max(remaining, key=lambda number: len(remaining[number] & wanted))
        wanted -= remaining.pop(best)
        chosen.add(best)
    return [
        case if number in chosen else pytest.param(*case, marks=pytest.mark.slow) for number, case in enumerate(cases)
    ]


def mark_unsampled_slow(items: Iterable[pytest.Item]) -> None:
    """Mark as slow all cases of a test with the mark `sample(count)` but `count`, which are spread over its schedules.

    Cases are ordered by a checksum of their names, so that new cases change the choice among the others little.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        count = cases[0].get_closest_marker("sample").args[0]
        for item in sorted(cases, key=_make_turn_key(cases))[count:]:
            item.add_marker(pytest.mark.slow)


def _make_turn_key(cases: Sequence[pytest.Item]) -> Callable[[pytest.Item], tuple[int, int]]:
    """Return a key by which each group of cases gives one case in turn; a group has the text before its workload."""
    groups: dict[str, list[int]] = defaultdict(list)
    for item in cases:
        groups[_name_group(item)].append(_checksum(item))
    turns = {checksum: turn for group in groups.values() for turn, checksum in enumerate(sorted(group))}
    return lambda item: (turns[_checksum(item)], _checksum(item))


def _name_group(item: pytest.Item) -> str:
    return re.split("conv[123]d|filter[12]d", item.nodeid.partition("[")[2])[0]


def _checksum(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())
