import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmconv.compiler.executable import LaunchConfig
from tvmconv.devices import Timing
from tvmconv.errors import Error
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.charts import compute_size_info, compute_sweep_info
from tvmconv.reports.sweep import make_table
from tvmconv.reports.tables import (
    Table,
    format_result,
    format_significant,
    list_notes,
    make_result_table,
    replace_section,
)
from tvmconv.workloads import parse


def timed(name, seconds, **fields):
    timing = Timing((seconds,), "CUDA graph of 20 launches, 50 replays, hot L2", cold=False)
    launch = LaunchConfig((16, 1, 1), (64, 2, 1))
    defaults = {"verified": True, "error": 2e-7, "gflops": 1e-9 / seconds, "launch": launch, "shared_bytes": 1440}
    return ResultRow(name, timing=timing, **{**defaults, **fields})


def on_gpu(*rows, workload="conv2d:1x64x64x64,64x64x3x3,p1", peaks=(None, None)):
    return Result(parse(workload), "cuda:0", "NVIDIA H200", 0, rows, *peaks)


def sweep_table(labels, results, counts=()):
    return make_table(Sweep("mine", labels, results, "", [*counts]))


def column(result, start):
    table = make_result_table(result)
    (place,) = (i for i, header in enumerate(table.headers) if header.startswith(start))
    return [row[place] for row in table.rows]


def headers(result):
    return " ".join(make_result_table(result).headers)


def test_markdown_says_how_columns_are_aligned():
    text = Table(("name", "n"), [("a", "1")], left_aligned=frozenset({"name"})).format_markdown()
    assert text.splitlines() == ["| name | n |", "| :-- | --: |", "| a | 1 |"]


def test_times_below_a_millisecond_are_in_microseconds():
    result = on_gpu(timed("default", 17.858e-3), timed("tiling", 76e-6))
    assert column(result, "time ± spread [µs]") == ["17,858 ± 0.0%", "76.0 ± 0.0%"]


def test_the_rate_of_what_memory_bounds_is_its_bandwidth():
    row = timed("basic", 1e-3, bandwidth=2.5e12, bandwidth_share=0.521)
    result = on_gpu(row, workload="filter2d:64x64x1,5x5")
    assert column(result, "GB/s") == ["2,500"]
    assert column(result, "of memory's peak") == ["52.1%"]
    assert "GFLOP/s" not in headers(result)


@pytest.mark.parametrize(("peak_flops", "bound"), [(7e12, True), (6e12, False)])
def test_the_devices_peaks_tell_what_bounds_a_workload(peak_flops, bound):
    result = on_gpu(workload="filter1d:1000000000,k25", peaks=(peak_flops, 1e12))  # 6.25 FLOP/byte
    assert result.is_memory_bound == bound


def test_a_failed_row_has_dashes_and_a_note_with_the_reason():
    result = on_gpu(timed("default", 1e-3), ResultRow("tiling", failure="it does not compile"))
    assert column(result, "GFLOP/s")[1] == "—"
    assert "tiling failed: it does not compile" in list_notes(result)


def test_nothing_timed_is_still_a_table():
    assert "default failed: broken" in format_result(on_gpu(ResultRow("default", failure="broken")))


def test_a_sweep_has_a_line_a_workload_and_a_column_a_schedule():
    results = [
        on_gpu(timed("default", 70e-6, speedup=1.0), timed("tiling", 17e-6, speedup=4.12)),
        on_gpu(timed("default", 267e-6, speedup=1.0), ResultRow("tiling", failure="broken")),
    ]
    table = sweep_table(["16", "32"], results)
    assert table.headers == ["channels", "default [µs]", "tiling [µs]"]
    assert table.rows == [["16", "70.0", "17.0 (4.12×)"], ["32", "267", "failed"]]


def test_the_naive_column_is_always_first():
    results = [
        on_gpu(timed("tiling", 1.0)),
        on_gpu(timed("default", 267e-6, speedup=1.0), timed("tiling", 100e-6, speedup=2.67)),
    ]
    table = sweep_table(["large", "small"], results)
    assert table.headers == ["layer", "default [µs]", "tiling [µs]"]
    assert table.rows == [["large", "—", "1,000,000"], ["small", "267", "100 (2.67×)"]]


def test_of_a_network_the_last_line_has_the_times_of_all_layers():
    results = [on_gpu(timed("default", 4e-6), timed("tiling", 1e-6, speedup=4.0), timed("cudnn", 1e-6))] * 2
    results[1] = replace(results[1], rows=(*results[1].rows[:2], ResultRow("cudnn", failure="broken")))
    table = sweep_table(["a", "b"], results, [3, 1])
    assert table.rows[-1] == ["all, times their number", "16.0", "4.00 (4.00×)", "—"]
    assert len(sweep_table(["a", "b"], results).rows) == 2


def sized(*exponents, **fields):
    """Results of a 1-D filter over sizes 2^exponent, which take 1 ms each and are cold from 2^20 on."""
    return [
        on_gpu(
            replace(timed("basic", 1e-3, bandwidth=1e9, **fields), timing=Timing((1e-3,), "by hand", exponent >= 20)),
            workload=f"filter1d:{1 << exponent},k5",
            peaks=(60e12, 4e12),
        )
        for exponent in exponents
    ]


def test_bandwidths_have_a_line_a_schedule_and_a_column_a_size():
    table = sweep_table(["2^18", "2^20"], sized(18, 20, bandwidth_share=0.25))
    assert table.headers == ["GB/s", "2^18 hot", "2^20 cold"]
    assert table.rows == [["basic", "1.00 (25.0%)", "1.00 (25.0%)"]]


def test_sizes_are_drawn_over_elements_beside_the_memorys_peak():
    info = compute_size_info("title", sized(20, 18))
    assert (info.ticks, info.labels) == ((2.0**18, 2.0**20), ("2¹⁸\nhot", "2²⁰\ncold"))
    assert (info.unit, info.peak_rate) == ("GB/s", 4000)
    assert [(line.name, line.y) for line in info.series] == [("basic", (1.0, 1.0))]


@given(st.floats(1e-6, 1e9))
def test_significant_digits_are_within_half_a_percent(value):
    assert math.isclose(float(format_significant(value).replace(",", "")), value, rel_tol=5e-3)


@pytest.mark.parametrize(("value", "text"), [(0.12345, "0.123"), (1.5, "1.50"), (76.04, "76.0"), (17858.3, "17,858")])
def test_significant_digits_are_never_in_exponents(value, text):
    assert format_significant(value) == text


def test_a_chart_has_a_line_a_schedule():
    results = [on_gpu(timed("default", 1e-3, gflops=2.0)), on_gpu(timed("default", 1e-3, gflops=3.0))]
    info = compute_sweep_info("title", "channels", ["16", "32"], results)
    assert info.is_log_x
    assert [(line.name, line.x, line.y) for line in info.series] == [("default", (16.0, 32.0), (2.0, 3.0))]


def test_a_chart_of_names_puts_them_side_by_side():
    info = compute_sweep_info("title", "layer", ["conv1", "conv2"], [on_gpu(), on_gpu()])
    assert (info.is_log_x, info.ticks) == (False, (0.0, 1.0))


def test_a_section_of_a_page_is_replaced_and_nothing_else():
    page = "a\n<!-- d2l -->\nold\n<!-- /d2l -->\nb\n"
    new = replace_section(page, "d2l", "| new |\n")
    assert new == "a\n<!-- d2l -->\n| new |\n<!-- /d2l -->\nb\n"
    assert replace_section(new, "d2l", "| new |") == new


@pytest.mark.parametrize(
    "page", ["", "<!-- d2l -->\n", "<!-- /d2l -->\n<!-- d2l -->\n", "<!-- d2l -->\n<!-- /d2l -->\n" * 2]
)
def test_a_page_without_its_section_is_refused(page):
    with pytest.raises(Error, match="one line <!-- d2l --> and after it one line <!-- /d2l -->"):
        replace_section(page, "d2l", "text")
