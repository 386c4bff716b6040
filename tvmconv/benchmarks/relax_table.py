"""Make a table of whole networks compiled by TVM, one line each, from the results of `tvmconv bench relax-models`.

tvmconv bench relax-table results/relax-*.json --update-page docs/relax.md
tvmconv bench relax-table results/relax-*.json --candidates --update-page docs/relax.md

With --candidates, the table has the candidates of MetaSchedule that each time comes from.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tvmconv.benchmarks.common import read_results, require_files_of, show
from tvmconv.benchmarks.relax_methods import METHODS
from tvmconv.cli import options
from tvmconv.reports.tables import EMPTY_CELL, Table, format_mean, format_micros, format_optional

OURS = "tvmconv-relax"
COMPARED = ("tvm", "tvm-nhwc", "metaschedule", "pytorch", "tvmconv-torch")  # whose time is divided by ours
# The fastest of several methods stands in the table for the first one.
GROUPS = (("pytorch", "pytorch-compiled", "pytorch-autotuned"), ("tvmconv-torch", "tvmconv-torch-log"))
LABELS = {name: method.label for name, method in METHODS.items()} | {"pytorch": "PyTorch, best"}
SECTION = "relax-models"
LEGEND = (
    "Microseconds per call of calls that are queued one after another. *TVM*: its default pipeline, which schedules "
    "by dlight's rules; *channels last* lets the rule for tensor cores apply to more layers. *PyTorch, best*: the "
    "fastest of eager calls, a CUDA graph and, where it was measured, `torch.compile` in a CUDA graph, all channels "
    "last. *tvmconv.torch*: the faster of a search of its own and the kernels that the search of tvmconv.relax has "
    "found, in a CUDA graph. *×*: the time of another method divided by that of tvmconv.relax. *Made in*: seconds "
    "of search and compilation by `tvmconv.relax`. *Error*: relative L2 difference of its output from that in "
    "float64. The files of each line list versions, date and command."
)
CANDIDATES_SECTION = "relax-candidates"
CANDIDATES_LEGEND = (
    "*Tried*: candidates that were built and timed, or failed. *Tasks with a time*: those of which a candidate has a "
    "time. *×*: the time of the network divided by that of tvmconv.relax in the table above."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="Files relax-NAME.json of networks.")
    parser.add_argument("--candidates", action="store_true", help="Make the table of MetaSchedule's candidates.")
    options.add_page(parser)


def run(args: argparse.Namespace) -> int:
    """Read the results, print the table and write it into a page."""
    results = read_results(args.results)
    make_table, section, legend = make_relax_models_table, SECTION, LEGEND
    if args.candidates:
        make_table, section, legend = make_candidates_table, CANDIDATES_SECTION, CANDIDATES_LEGEND
    with require_files_of("relax-models"):
        table = make_table(results)
    show(table, args, section, legend)
    return 0


def make_relax_models_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with one row per network, dtype, batch and GPU, and the geometric means in the last row. The
    columns are the methods of which a result has a time. Results of the same case are merged, of which the last one
    counts; results that `tvmconv bench relax-models` did not write raise KeyError.
    """
    cases = _merge_results(results)
    for rows in cases.values():
        _keep_fastest(rows)
    methods = [method for method in METHODS if any(method in rows for rows in cases.values())]
    compared = [method for method in COMPARED if method in methods]
    lines, ratios = [], {method: list[float]() for method in compared}
    for (network, dtype, batch, gpu), rows in sorted(cases.items()):
        seconds = {method: float(row["device_seconds"]) for method, row in rows.items()}
        speedups = {method: seconds[method] / seconds[OURS] for method in compared if {method, OURS} <= seconds.keys()}
        for method, speedup in speedups.items():
            ratios[method].append(speedup)
        ours = rows.get(OURS, {"made_seconds": None, "error": None})
        lines.append(
            (
                *(network, dtype, str(batch), gpu),
                *(format_micros(seconds.get(method)) for method in methods),
                *(format_optional(speedups.get(method)) for method in compared),
                format_optional(ours["made_seconds"]),
                EMPTY_CELL if ours["error"] is None else f"{ours['error']:.1e}",
            )
        )
    empty = [EMPTY_CELL] * (3 + len(methods))
    lines.append(("geometric mean", *empty, *map(format_mean, ratios.values()), EMPTY_CELL, EMPTY_CELL))
    headers = (
        *("network", "dtype", "batch", "GPU"),
        *(f"{LABELS[method]} [µs]" for method in methods),
        *(f"× {LABELS[method]}" for method in compared),
        *("made in [s]", "error"),
    )
    return Table(headers, lines, {"network", "dtype", "GPU"})


def make_candidates_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with one row per result of MetaSchedule: how many candidates of how many tasks it comes from."""
    cases, lines = _merge_results(results), []
    for result in results:
        for row in result["rows"]:
            if row["method"] != "metaschedule" or row["device_seconds"] is None:
                continue
            case, details = _get_case(result), row["details"]
            ours = cases[case].get(OURS)
            speedup = float(row["device_seconds"]) / float(ours["device_seconds"]) if ours else None
            num_timed_tasks = sum(timed > 0 for _, timed in details["trials_by_task"])
            counts = (details["tasks"], num_timed_tasks, details["trials"], details["succeeded"])
            times = format_micros(float(row["device_seconds"])), format_optional(speedup)
            lines.append((*map(str, (*case, *counts)), *times))
    headers = (
        *("network", "dtype", "batch", "GPU", "tasks", "tasks with a time", "tried", "with a time"),
        *(f"{LABELS['metaschedule']} [µs]", f"× {LABELS[OURS]}"),
    )
    return Table(headers, sorted(lines), {"network", "dtype", "GPU"})


Case = tuple[str, str, int, str]  # network, dtype, batch and GPU


def _get_case(result: Mapping[str, Any]) -> Case:
    return result["network"], result["dtype"], result["batch"], result["provenance"].partition(";")[0]


def _merge_results(results: Sequence[Mapping[str, Any]]) -> dict[Case, dict[str, Mapping[str, Any]]]:
    """Return the rows with a time of each case by their method, of which the last one counts."""
    cases: dict[Case, dict[str, Mapping[str, Any]]] = {}
    for result in results:
        rows = {row["method"]: row for row in result["rows"] if row["device_seconds"] is not None}
        cases.setdefault(_get_case(result), {}).update(rows)
    return cases


def _keep_fastest(rows: dict[str, Mapping[str, Any]]) -> None:
    """Put the fastest row of each group of methods in place of its rows."""
    for group in GROUPS:
        group_rows = [row for method in group if (row := rows.pop(method, None))]
        if group_rows:
            rows[group[0]] = min(group_rows, key=lambda row: float(row["device_seconds"]))
