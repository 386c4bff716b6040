"""What a chart of a suite says of its layers and of the network, and that it is drawn."""

from dataclasses import replace
from string import ascii_letters

import pytest

from tvmconv.devices import Timing
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.experiments.sweep import Sweep, fill_counts
from tvmconv.reports.charts import SweepInfo
from tvmconv.reports.suite import compute_suite_info, format_heading, format_total
from tvmconv.reports.sweep import compute_chart, draw_chart
from tvmconv.workloads import parse, suite

LARGEST_PNG = 120_000


def row(name, micros):
    timing = None if micros is None else Timing((micros * 1e-6,), "by hand", False)
    return ResultRow(
        name, timing=timing, failure=None if timing else "broken", library=None if name == "tuned" else name
    )


def suite_of(*layers, names=("tuned", "cudnn"), counts=(), name="mine-tuned"):
    """A sweep over layers a, b, ..., each given by the µs of the rows."""
    results = [
        Result(parse(f"conv2d:1x{n}x6x6,4x{n}x1x1"), "cuda:0", "a GPU", 0, tuple(map(row, names, times)))
        for n, times in enumerate(layers, 1)
    ]
    return Sweep(name, [*ascii_letters[: len(layers)]], results, "here", [*counts])


def test_the_worst_layer_is_first():
    info = compute_suite_info("title", suite_of((2, 6), (2, 1), (2, 3)))
    assert [bar.label for bar in info.bars] == ["b", "c", "a"]
    assert [bar.speedups for bar in info.bars] == [pytest.approx((each,)) for each in (0.5, 1.5, 3.0)]


def test_our_failures_come_first_and_theirs_last():
    info = compute_suite_info("title", suite_of((2, 6), (2, None), (None, 3), (2, 1), counts=(1, 2, 1, 1)))
    assert [bar.label for bar in info.bars] == ["c", "d", "a", "b"]
    assert (info.totals[0].kernel_seconds, info.totals[0].library_seconds) == (None, None)
    assert format_total(info, info.totals[0]) == "geometric mean over cudnn 1.22 ×; 1 of 2 slower; 2 failed"


def test_layers_have_shares_of_the_networks_time():
    info = compute_suite_info("title", suite_of((1, 8), (4, 2), counts=(6, 1)))
    assert format_total(info, info.totals[0]) == (
        "all layers: tuned 10.0 µs, cudnn 50.0 µs: 5.00 × as fast; geometric mean 2.00 ×; 1 of 2 slower"
    )
    assert [(bar.label, bar.count, bar.time_fraction) for bar in info.bars] == [
        ("b", 1, pytest.approx(0.4)),
        ("a", 6, pytest.approx(0.6)),
    ]


def test_a_copy_which_nobody_can_beat_is_not_what_bars_are_about():
    info = compute_suite_info("title", suite_of((2, 1, 3, 4), names=("tuned", "copy", "cupy", "cudnn")))
    assert [total.name for total in info.totals] == ["cupy", "cudnn", "copy"]
    assert info.bars[0].library_seconds == pytest.approx((3e-6, 4e-6, 1e-6))
    assert compute_suite_info("title", suite_of((2, 1), names=("tuned", "copy"))).library_name == "copy"


def test_of_schedules_that_are_not_tuned_the_fastest_counts():
    sweep = suite_of((9, 3, 4), (9, None, 2), names=("default", "tiling", "cudnn"))
    bare = [
        replace(result, rows=tuple(replace(row, library=None) for row in result.rows[:2])) for result in sweep.results
    ]
    ladder = [
        replace(each, rows=(*each.rows, result.rows[2])) for each, result in zip(bare, sweep.results, strict=True)
    ]
    info = compute_suite_info("title", replace(sweep, results=ladder))
    assert (info.kernel_name, info.library_name) == ("fastest schedule", "cudnn")
    assert [(bar.label, bar.kernel_seconds) for bar in info.bars] == [
        ("b", pytest.approx(9e-6)),
        ("a", pytest.approx(3e-6)),
    ]
    alone = compute_suite_info("title", replace(sweep, results=bare))
    assert (alone.library_name, alone.bars[0].speedups, alone.bars[1].speedups) == (
        "default",
        (1,),
        (pytest.approx(3),),
    )


def test_bars_are_of_layers_and_lines_of_channels():
    layers = suite_of((2, 6), (2, 1))
    assert compute_chart(layers) == compute_suite_info("Convolutions of suite mine-tuned, float32, on a GPU", layers)
    lines = compute_chart(replace(layers, labels=["1", "2"]))
    assert isinstance(lines, SweepInfo)
    assert lines.title == format_heading(
        compute_suite_info("Convolutions of suite mine-tuned, float32, on a GPU", layers)
    )
    assert isinstance(compute_chart(suite_of((2,), (1,), names=("tuned",))), SweepInfo)  # nothing to compare with


def test_a_file_without_counts_has_those_of_its_suite():
    layers = [layer for layer in suite("resnet50", 32, dtype="float16", layout="nhwc") if "3x3" in layer.name]
    results = [Result(layer.workload, "cuda:0", "a GPU", 0, (row("tuned", 1.0),)) for layer in layers]
    sweep = Sweep("resnet50-3x3-f16-nhwc-b32-tuned", [layer.name for layer in layers], results, "here")
    assert fill_counts(sweep).counts == [layer.count for layer in layers]
    assert fill_counts(replace(sweep, name="resnet501-tuned")).counts == []
    assert fill_counts(replace(sweep, name="mobilenet-tuned")).counts == []
    own = replace(sweep, counts=[7] * len(layers))
    assert fill_counts(own) is own


@pytest.mark.parametrize("layers", [1, 50])
def test_a_chart_is_drawn_and_small(tmp_path, layers):
    times = [(2, 1 + n / 9, 3) for n in range(layers)]
    sweep = suite_of(*times, names=("tuned", "cudnn", "copy"), counts=range(1, layers + 1))
    draw_chart(sweep, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "chart.png").stat().st_size < LARGEST_PNG
