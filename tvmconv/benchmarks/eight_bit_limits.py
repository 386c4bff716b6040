"""Limits of convolutions of 8-bit operands: what the device copies, and the fastest products that were measured.

No kernel is expected to be faster than a copy of as many bytes as its input and output have, nor to multiply faster
than the fastest kernel of the same table. A library's time divided by the limit is the largest speed-up to expect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from tvmconv.baselines.device_copy import time_copy
from tvmconv.benchmarks.layouts import ROUND_SECONDS
from tvmconv.devices import Device
from tvmconv.workloads import Conv, parse

COPY = "copy"  # key of the seconds of a copy of as many bytes as a kernel of 8-bit operands moves
LIMIT = "limit"  # key of the limit, beside seconds


def time_bytes(w: Conv, arrays: Sequence[NDArray[Any]], device: Device, *, cold: bool) -> float:
    """Return the seconds of a copy of as many bytes as a convolution's input and output have."""
    return time_copy(w, arrays, device=device, cold=cold, seconds=ROUND_SECONDS).timing.median


def find_fastest_rate(measured: Sequence[tuple[str, Mapping[str, float]]], names: Sequence[str]) -> float:
    """Return the largest number of operations per second of the kernels of 8-bit operands, or 0 without kernels.

    Args:
        measured: Texts of convolutions, with the seconds of kernels by name.
        names: Names of the kernels of 8-bit operands.
    """
    rates = [parse(text).flops / times[name] for text, times in measured for name in names if name in times]
    return max(rates, default=0.0)


def add_limit(text: str, times: Mapping[str, float], fastest_rate: float) -> dict[str, float]:
    """Return the seconds of a convolution by name, with its limit as `LIMIT` if its copy was timed."""
    limit = {LIMIT: max(times[COPY], parse(text).flops / fastest_rate)} if COPY in times and fastest_rate else {}
    return {**times, **limit}
