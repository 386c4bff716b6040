"""The table of networks: their times with tvmconv's kernels and with a library's, by dtype, layout and batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from tvmconv.experiments.run import TUNED
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.suite import LibraryTotal, compute_suite_info
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant
from tvmconv.workloads import Conv, dtypes

MIXED_VALUE = "mixed"


@dataclass(frozen=True)
class NetworkVariant:
    """The properties that all convolutions of a network share, as in workload texts; `MIXED_VALUE` where they differ.

    Attributes:
        dtype: Text of the dtype, such as `f16`.
        layout: Layout, such as `nhwc`.
        batch: Batch size.
    """

    dtype: str
    layout: str
    batch: str


def make_networks_table(sweeps: Sequence[Sweep]) -> Table:
    """Return a table with one row per network and library, sorted by name, dtype and batch; filters are left out."""
    lines = []
    for sweep in sweeps:
        info = compute_suite_info("", sweep)
        if info and all(isinstance(result.workload, Conv) for result in sweep.results):
            variant = find_variant(sweep)
            for total in info.totals:
                lines.append(
                    (make_sort_key(sweep, variant), _format_row(make_suite_name(sweep, variant), variant, total))
                )
    lines.sort(key=lambda line: line[0])
    headers = (
        "suite",
        *(variant_field.name for variant_field in fields(NetworkVariant)),
        "library",
        "layers",
        "slower",
        "× geometric mean",
    )
    times = ("network [µs]", "with the library [µs]", "×")
    return Table(
        (*headers, *times), [line for _, line in lines], left_aligned=frozenset({"suite", "dtype", "layout", "library"})
    )


def _format_row(name: str, variant: NetworkVariant, total: LibraryTotal) -> tuple[str, ...]:
    layers = str(total.num_layers), str(total.num_slower), _format_value(total.mean_speedup)
    micros = [seconds and seconds * 1e6 for seconds in (total.kernel_seconds, total.library_seconds)]
    return (
        name,
        variant.dtype,
        variant.layout,
        variant.batch,
        total.name,
        *layers,
        *map(_format_value, (*micros, total.speedup)),
    )


def _format_value(value: float | None) -> str:
    return format_significant(value) if value else EMPTY_CELL


def find_variant(sweep: Sweep) -> NetworkVariant:
    """Return the properties that all convolutions of a sweep share."""
    workloads: list[Any] = [result.workload for result in sweep.results]  # dataclasses, which `Workload` is not
    values_by_property = (
        {dtypes.DTYPES[workload.dtype].text for workload in workloads},
        {workload.layout for workload in workloads},
        {str(workload.N) for workload in workloads},
    )
    return NetworkVariant(*(values.pop() if len(values) == 1 else MIXED_VALUE for values in values_by_property))


def make_suite_name(sweep: Sweep, variant: NetworkVariant) -> str:
    """Return the sweep's name without the words that other columns show."""
    shown_words = {TUNED, variant.dtype, variant.layout, f"b{variant.batch}"}
    base_name, *words = sweep.name.split("-")
    return "-".join([base_name, *(word for word in words if word not in shown_words)])


def make_sort_key(sweep: Sweep, variant: NetworkVariant) -> tuple[str, int, str, int]:
    """Return a key that sorts by suite, by dtype from float32 to 16 bits, then by batch; mixed values come first."""
    dtype = [*dtypes.DTYPES_BY_TEXT].index(variant.dtype) if variant.dtype != MIXED_VALUE else -1
    return (
        make_suite_name(sweep, variant),
        dtype,
        variant.layout,
        int(variant.batch) if variant.batch != MIXED_VALUE else 0,
    )
