"""What is said of tuned kernels beside libraries."""

from dataclasses import replace

import pytest

from tvmconv.devices import Timing
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports import library_comparison
from tvmconv.reports.sweep import format_markdown
from tvmconv.workloads import parse


def row(name, micros, **more):
    return ResultRow(name, verified=True, timing=Timing((micros * 1e-6,), "by hand", False), **more)


def result(channels, *rows):
    return Result(parse(f"conv2d:1x{channels}x6x6,4x{channels}x1x1"), "cuda:0", "a GPU", 0, rows)


@pytest.fixture
def sweep():
    """Two layers, of which the network has three and one; cuDNN is faster for the second."""
    results = [
        result(
            2,
            row("default", 9.0),
            row("tuned", 1.0, schedule="direct", config={"tile_f": (-1, 2), "sliced_k": 2}),
            row("cudnn", 8.0, library="cuDNN 9, best algorithm, in NHWC"),
        ),
        result(
            4,
            row("default", 99.0),
            row("tuned", 4.0, schedule="implicit_gemm"),
            row("cudnn", 2.0, library="cuDNN 9, best algorithm, in NCHW"),
        ),
    ]
    return Sweep("d2l-tuned", ["a", "b"], results, "here", [3, 1])


def lines(table):
    return [[cell for cell in line.split("  ") if cell] for line in table.format_text().splitlines()]


def test_layers_have_winners_and_the_network_sums_and_a_mean(sweep):
    assert [[cell.strip() for cell in line] for line in lines(library_comparison.make_comparison_table(sweep))] == [
        ["layer", "times", "schedule", "tuned [µs]", "cudnn [µs]", "× cudnn", "cudnn, how"],
        ["a", "3", "direct", "1.00", "8.00", "8.00", "in NHWC"],
        ["b", "1", "implicit_gemm", "4.00", "2.00", "0.500", "in NCHW"],
        ["all, times their number", "—", "—", "7.00", "26.0", "3.71", "—"],
        ["geometric mean", "—", "—", "—", "—", "2.00", "—"],
    ]


def test_slower_layers_and_failures_are_listed(sweep):
    assert library_comparison.list_remarks(sweep) == ["Slower than cudnn: b (0.500 ×)."]
    failed = replace(sweep.results[1], rows=(*sweep.results[1].rows[:-1], ResultRow("cudnn", failure="no memory")))
    broken = replace(sweep, results=[sweep.results[0], failed])
    assert library_comparison.list_remarks(broken) == ["Slower than cudnn: none.", "b: cudnn failed: no memory"]
    *_, total, mean = library_comparison.make_comparison_table(broken).rows
    assert [*total[3:6]] == ["7.00", "—", "—"]
    assert mean[5] == "8.00"


def test_the_page_has_the_configs_and_the_ladder_if_there_is_one(sweep):
    page = format_markdown(sweep)
    assert "| a | `conv2d:1x2x6x6,4x2x1x1,s1,p0` | direct | `tile_f=-1,2 sliced_k=2` |" in page
    assert "| a | 9.00 | 1.00 | 8.00 |" in page
    bare = replace(sweep, results=[replace(each, rows=each.rows[1:]) for each in sweep.results])
    assert "With schedules that are not tuned" in page
    assert "With schedules that are not tuned" not in format_markdown(bare)
    assert format_markdown(bare).endswith("Median times. here\n")


def test_a_sweep_with_counts_is_read_as_it_was_written(sweep, tmp_path):
    (tmp_path / "a.json").write_text(sweep.to_json())
    assert Sweep.read(tmp_path / "a.json") == sweep
