"""Layers and networks beside libraries: the chart of a suite, and tables of tuned kernels and of predictions."""

from dataclasses import replace
from pathlib import Path
from string import ascii_letters

import pytest
from made_results import make_result, make_row, make_sweep

from tvmconv.benchmarks.networks import (
    compute_roofline_headroom,
    make_networks_table,
    make_predictions_table,
    make_slower_layers_table,
)
from tvmconv.devices.power import SustainedRun
from tvmconv.experiments.sweep import Sweep, fill_counts
from tvmconv.reports import library_comparison
from tvmconv.reports.charts import SweepInfo
from tvmconv.reports.limits import compute_limits_info
from tvmconv.reports.suite import compute_suite_info, format_heading, format_total
from tvmconv.reports.sweep import compute_chart, draw_chart, format_markdown, write_sweep
from tvmconv.target import BEST_RATES
from tvmconv.workloads import Conv, suite

ROOT = Path(__file__).parents[2]
LARGEST_PNG = 120_000
TITLE = "Convolutions of suite mine-tuned, float32, on a GPU"


def suite_of(*layers, names=("tuned", "cudnn"), counts=(), libraries=("cudnn", "copy", "cupy")):
    """A sweep over layers a, b, ..., each given by the µs of the rows."""
    results = {}
    for n, times in enumerate(layers, 1):
        rows = [
            make_row(name, time, library=name if name in libraries else None)
            for name, time in zip(names, times, strict=True)
        ]
        results[ascii_letters[n - 1]] = make_result(f"conv2d:1x{n}x6x6,4x{n}x1x1", *rows)
    return make_sweep(results, counts)


def test_the_worst_layer_is_first():
    info = compute_suite_info("title", suite_of((2, 6), (2, 1), (2, 3)))
    assert [(bar.label, *bar.speedups) for bar in info.bars] == [("b", 0.5), ("c", 1.5), ("a", pytest.approx(3))]


def test_own_failures_come_first_and_those_of_libraries_last():
    info = compute_suite_info("title", suite_of((2, 6), (2, None), (None, 3), (2, 1), counts=(1, 2, 1, 1)))
    assert [bar.label for bar in info.bars] == ["c", "d", "a", "b"]
    assert (info.totals[0].kernel_seconds, info.totals[0].library_seconds) == (None, None)
    assert format_total(info, info.totals[0]) == "geometric mean over cudnn 1.22 ×; 1 of 2 slower; 2 failed"


def test_layers_have_fractions_of_the_networks_time():
    info = compute_suite_info("title", suite_of((1, 8), (4, 2), counts=(6, 1)))
    assert format_total(info, info.totals[0]) == (
        "all layers: tuned 10.0 µs, cudnn 50.0 µs: 5.00 × as fast; geometric mean 2.00 ×; 1 of 2 slower"
    )
    fractions = [(bar.label, bar.count, bar.time_fraction) for bar in info.bars]
    assert fractions == [("b", 1, pytest.approx(0.4)), ("a", 6, pytest.approx(0.6))]


def test_bars_compare_with_a_copy_only_without_a_library():
    info = compute_suite_info("title", suite_of((2, 1, 3, 4), names=("tuned", "copy", "cupy", "cudnn")))
    assert [total.name for total in info.totals] == ["cupy", "cudnn", "copy"]
    assert info.bars[0].library_seconds == pytest.approx((3e-6, 4e-6, 1e-6))
    assert compute_suite_info("title", suite_of((2, 1), names=("tuned", "copy"))).library_name == "copy"


def test_without_tuning_the_fastest_schedule_counts():
    sweep = suite_of((9, 3, 4), (9, None, 2), names=("default", "tiling", "cudnn"))
    info = compute_suite_info("title", sweep)
    assert (info.kernel_name, info.library_name) == ("fastest schedule", "cudnn")
    assert [bar.kernel_seconds for bar in info.bars] == pytest.approx([9e-6, 3e-6])
    alone = compute_suite_info("title", suite_of((9, 3), (9, None), names=("default", "tiling")))
    assert (alone.library_name, [bar.speedups for bar in alone.bars]) == ("default", [(1,), (pytest.approx(3),)])


def test_bars_are_of_layers_and_lines_of_channels():
    layers = suite_of((2, 6), (2, 1))
    assert compute_chart(layers) == compute_suite_info(TITLE, layers)
    lines = compute_chart(replace(layers, labels=["1", "2"]))
    assert isinstance(lines, SweepInfo)
    assert lines.title == format_heading(compute_suite_info(TITLE, layers))
    assert isinstance(compute_chart(suite_of((2,), (1,), names=("tuned",))), SweepInfo)  # nothing to compare with


def test_a_file_without_counts_has_those_of_its_suite():
    layers = [layer for layer in suite("resnet50", 32, dtype="float16", layout="nhwc") if "3x3" in layer.name]
    results = {layer.name: make_result(layer.workload.text, make_row("tuned", 1)) for layer in layers}
    sweep = make_sweep(results, name="resnet50-3x3-f16-nhwc-b32-tuned")
    assert fill_counts(sweep).counts == [layer.count for layer in layers]
    assert fill_counts(replace(sweep, name="resnet501-tuned")).counts == []
    assert fill_counts(replace(sweep, name="mobilenet-tuned")).counts == []
    own = replace(sweep, counts=[7] * len(layers))
    assert fill_counts(own) is own


@pytest.mark.sample(1)
@pytest.mark.parametrize("layers", [1, 50])
def test_a_chart_is_drawn_and_small(tmp_path, layers):
    times = [(2, 1 + n / 9, 3) for n in range(layers)]
    sweep = suite_of(*times, names=("tuned", "cudnn", "copy"), counts=range(1, layers + 1))
    draw_chart(sweep, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "chart.png").stat().st_size < LARGEST_PNG


def tuned_layer(channels, tuned, cudnn, layout, **fields):
    rows = make_row("tuned", tuned, **fields), make_row("cudnn", cudnn, library=f"cuDNN 9, best, in {layout}")
    return make_result(f"conv2d:1x{channels}x6x6,4x{channels}x1x1", make_row("default", 9), *rows)


@pytest.fixture
def tuned():
    """Two layers, of which the network has three and one; cuDNN is faster for the second."""
    config = {"tile_f": (-1, 2), "sliced_k": 2}
    a = tuned_layer(2, 1, 8, "NHWC", schedule="direct", config=config)
    b = tuned_layer(4, 4, 2, "NCHW", schedule="implicit_gemm")
    return make_sweep({"a": a, "b": b}, [3, 1], "d2l-tuned")


def test_layers_have_winners_and_the_network_sums_and_a_mean(tuned):
    table = library_comparison.make_comparison_table(tuned)
    assert table.headers == ["layer", "times", "schedule", "tuned [µs]", "cudnn [µs]", "× cudnn", "cudnn, how"]
    assert table.rows == [
        ("a", "3", "direct", "1.00", "8.00", "8.00", "in NHWC"),
        ("b", "1", "implicit_gemm", "4.00", "2.00", "0.500", "in NCHW"),
        ("all, times their number", "—", "—", "7.00", "26.0", "3.71", "—"),
        ("geometric mean", "—", "—", "—", "—", "2.00", "—"),
    ]


def test_times_are_shares_of_the_limit_of_a_known_device(tuned):
    results = [replace(each, peak_flops=1e9, peak_bandwidth=1e9) for each in tuned.results]
    table = library_comparison.make_comparison_table(replace(tuned, results=results))
    first = dict(zip(table.headers, table.rows[0], strict=True))
    flops, nbytes = 2 * 4 * 36 * 2, 4 * (2 * 36 + 8 + 4 * 36)
    share = max(flops, nbytes) / 1e9 / 1e-6
    assert float(first["tuned, of the limit"]) == pytest.approx(share, rel=0.01)
    assert float(first["cudnn, of the limit"]) == pytest.approx(share / 8, rel=0.01)


@pytest.fixture
def sustained(tuned):
    """The two layers on a device with sensors: ours at half the clock of the peaks, cuDNN's at all of it."""
    peaks = {"peak_flops": 1e9, "peak_bandwidth": 1e12, "peak_clock": 2e9}
    runs = {"tuned": SustainedRun(2e-6, 1e9, 500.0), "cudnn": SustainedRun(8e-6, 2e9, None)}
    results = [
        replace(result, **peaks, rows=tuple(replace(row, sustained=runs.get(row.name)) for row in result.rows))
        for result in tuned.results
    ]
    return replace(tuned, results=results)


def test_a_sustained_run_is_a_share_of_the_limit_at_its_clock(sustained):
    first = library_comparison.make_comparison_table(sustained).list_rows()[0]
    arithmetic_seconds = sustained.results[0].workload.flops / 1e9
    assert float(first["tuned, of the limit"]) == pytest.approx(2 * arithmetic_seconds / 2e-6, rel=0.01)
    assert float(first["cudnn, of the limit"]) == pytest.approx(arithmetic_seconds / 8e-6, rel=0.01)
    assert (first["tuned [MHz]"], first["tuned [mJ]"]) == ("1000", "1.00")
    assert (first["cudnn [MHz]"], first["cudnn [mJ]"]) == ("2000", "")


def test_clock_and_energy_are_kept_in_files_and_drawn(sustained, tmp_path):
    write_sweep(sustained, tmp_path)
    assert Sweep.read(tmp_path / "d2l-tuned.json") == sustained
    info = compute_limits_info("title", sustained)
    assert (info.labels, info.millijoules["tuned"]) == (("a", "b"), (1.0, 1.0))
    assert (tmp_path / "d2l-tuned-limits.png").stat().st_size < LARGEST_PNG


def test_without_sensors_there_is_no_chart_of_limits(tuned):
    results = [replace(each, peak_flops=1e9, peak_bandwidth=1e9) for each in tuned.results]
    assert compute_limits_info("title", replace(tuned, results=results)) is None


def test_slower_layers_and_failures_are_listed(tuned):
    assert library_comparison.list_remarks(tuned) == ["Slower than cudnn: b (0.500 ×)."]
    failed = replace(tuned.results[1], rows=(*tuned.results[1].rows[:-1], make_row("cudnn", failure="no memory")))
    broken = replace(tuned, results=[tuned.results[0], failed])
    assert library_comparison.list_remarks(broken) == ["Slower than cudnn: none.", "b: cudnn failed: no memory"]
    *_, total, mean = library_comparison.make_comparison_table(broken).rows
    assert total[3:6] == ("7.00", "—", "—")
    assert mean[5] == "8.00"


def test_the_page_has_the_configs_and_the_other_schedules(tuned):
    page = format_markdown(tuned)
    assert "| a | `conv2d:1x2x6x6,4x2x1x1,s1,p0` | direct | `tile_f=-1,2 sliced_k=2` |" in page
    assert "| a | 9.00 | 1.00 | 8.00 |" in page
    assert "With schedules that are not tuned" in page
    bare = replace(tuned, results=[replace(each, rows=each.rows[1:]) for each in tuned.results])
    assert "With schedules that are not tuned" not in format_markdown(bare)
    assert format_markdown(bare).endswith("Median times. here\n")


def test_a_sweep_with_counts_is_read_as_it_was_written(tuned, tmp_path):
    (tmp_path / "a.json").write_text(tuned.to_json())
    assert Sweep.read(tmp_path / "a.json") == tuned


def network(name, kind, counts=(3, 1)):
    """The layers above under another name, with workloads of a kind."""
    layers = {"a": (2, 1, 8), "b": (4, 4, 2)}
    results = {
        label: make_result(kind.format(channels), make_row("tuned", ours), make_row("cudnn", theirs))
        for label, (channels, ours, theirs) in layers.items()
    }
    return make_sweep(results, counts, name)


PLAIN = network("mine-tuned", "conv2d:1x{0}x6x6,4x{0}x1x1")


def test_a_network_is_a_row_with_its_total_and_the_librarys():
    table = make_networks_table([PLAIN, replace(PLAIN, name="other-3x3-tuned", counts=[])])
    assert table.rows == [
        ("mine", "f32", "nchw", "1", "cudnn", "2", "1", "2.00", "7.00", "26.0", "3.71"),
        ("other-3x3", "f32", "nchw", "1", "cudnn", "2", "1", "2.00", "—", "—", "—"),
    ]


def test_networks_are_sorted_by_name_dtype_and_batch():
    kinds = ("f16-nhwc-b32", "32x", ",f16,nhwc"), ("f16-nhwc-b2", "2x", ",f16,nhwc"), ("tf32", "1x", ",tf32")
    others = [
        network(f"mine-{name}-tuned", f"conv2d:{batch}{{0}}x6x6,4x{{0}}x1x1{rest}") for name, batch, rest in kinds
    ]
    found = make_networks_table([*others, replace(PLAIN, name="zoo-tuned"), PLAIN]).rows
    assert [line[:4] for line in found] == [
        ("mine", "f32", "nchw", "1"),
        ("mine", "tf32", "nchw", "1"),
        ("mine", "f16", "nhwc", "2"),
        ("mine", "f16", "nhwc", "32"),
        ("zoo", "f32", "nchw", "1"),
    ]


LARGE = "conv2d:1x512x128x128,512x512x3x3,s1,p1,f16,nhwc"  # 77.3 GFLOP: 97.2 µs at 795 TFLOP/s, and a launch
WIDE = "conv2d:1x64x512x512,64x64x1x1,s1,p0,f16,nhwc"  # 67.1 MB: 16.4 µs at 4.1 TB/s, 8.4 at 8, and a launch


def layer(text, cold=False, device="NVIDIA H200", **micros):
    return make_result(text, *(make_row(name, each, cold=cold) for name, each in micros.items()), device=device)


@pytest.mark.parametrize(("text", "cold", "least"), [(LARGE, False, 98.30), (WIDE, True, 17.44), (WIDE, False, 9.46)])
def test_attainable_time_is_a_launch_and_arithmetic_or_bytes(text, cold, least):
    assert compute_roofline_headroom(layer(text, cold, cudnn=2 * least), "cudnn") == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize(
    "unknown",
    [layer(LARGE, device="a GPU", cudnn=200), layer(LARGE.replace(",f16", ""), cudnn=200), layer(LARGE, tuned=200)],
    ids=["device", "dtype", "library"],
)
def test_attainable_time_is_known_for_some_gpus_and_dtypes(unknown):
    assert compute_roofline_headroom(unknown, "cudnn") is None


def test_no_measured_kernel_beats_the_attainable_time():
    compared = [Sweep.read(file) for file in (ROOT / "tuning_logs").glob("**/*-nhwc*-tuned.json")]
    fractions = [
        target.roofline_seconds(result.workload, in_l2=not row.timing.cold) / row.timing.median
        for sweep in compared
        for result in sweep.results
        if (target := BEST_RATES.get(result.device_name)) and isinstance(result.workload, Conv)
        for row in result.rows
        if row.timing and "winograd" not in (row.schedule or row.name)
    ]
    assert len(fractions) > 1000
    assert 0.99 < max(fractions) <= 1  # and some reach it


def test_slower_layers_are_listed_with_the_possible_gain():
    layers = {
        "a": layer(LARGE, predicted=130, tuned=125, cudnn=120),
        "b": layer(WIDE, predicted=20, tuned=12, cudnn=11.8),
    }
    (line,) = make_slower_layers_table([make_sweep(layers, [1, 1])]).rows
    assert (line[3], *line[-2:]) == (LARGE, "0.960", "1.22")
    assert not make_slower_layers_table([make_sweep({"a": layer(LARGE, tuned=125, cudnn=100)}, [1])]).rows


def test_a_predicted_network_is_a_row_with_means_and_bounds():
    layers = {
        "a": layer(LARGE, predicted=160, untuned=400, tuned=80, cudnn=120),
        "b": layer(WIDE, predicted=20, untuned=20, tuned=20, cudnn=20),
    }
    unpredicted = make_sweep({"a": layer(LARGE, tuned=80, cudnn=120)}, [1], "other-tuned")
    table = make_predictions_table([make_sweep(layers, [1, 2], "mine-f16-nhwc-tuned"), unpredicted])
    (row,) = [dict(zip(table.headers, cells, strict=True)) for cells in table.rows]
    assert [row[name] for name in ("suite", "dtype", "layout", "batch", "layers")] == ["mine", "f16", "nhwc", "1", "2"]
    assert [row[name] for name in ("predicted × cudnn", "untuned × cudnn", "tuned × cudnn")] == [
        "0.866",
        "0.548",
        "1.22",
    ]
    assert [row[name] for name in ("attainable × cudnn", "attainable < 1.5", "predicted < 0.8")] == ["1.61", "1", "1"]
    assert [row[name] for name in ("predicted [µs]", "cudnn [µs]")] == ["200", "160"]
