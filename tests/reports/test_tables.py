"""Tables of results and of sweeps, the numbers of their charts, and sections of pages."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_results import make_result, make_row, make_sweep

from tvmconv.compiler.executable import LaunchConfig
from tvmconv.errors import Error
from tvmconv.reports.charts import compute_size_info, compute_sweep_info
from tvmconv.reports.sweep import make_table, make_title
from tvmconv.reports.tables import (
    Table,
    format_result,
    format_significant,
    list_notes,
    make_result_table,
    replace_section,
)

CONVOLUTION = "conv2d:1x64x64x64,64x64x3x3,p1"


def timed(name, micros, **fields):
    launch = LaunchConfig((16, 1, 1), (64, 2, 1))
    defaults = {"verified": True, "error": 2e-7, "gflops": 1e-3 / micros, "launch": launch, "shared_bytes": 1440}
    return make_row(name, micros, **{**defaults, **fields})


def columns(result):
    table = make_result_table(result)
    return dict(zip(table.headers, zip(*table.rows, strict=True), strict=True))


def test_markdown_says_how_columns_are_aligned():
    text = Table(("name", "n"), [("a", "1")], {"name"}).format_markdown()
    assert text.splitlines() == ["| name | n |", "| :-- | --: |", "| a | 1 |"]


def test_times_below_a_millisecond_are_in_microseconds():
    result = make_result(CONVOLUTION, timed("default", 17858), timed("tiling", 76))
    assert columns(result)["time ± spread [µs]"] == ("17,858 ± 0.0%", "76.0 ± 0.0%")


def test_the_rate_of_what_memory_bounds_is_its_bandwidth():
    row = timed("basic", 1000, bandwidth=2.5e12, bandwidth_share=0.521)
    found = columns(make_result("filter2d:64x64x1,5x5", row))
    assert (found["GB/s"], found["of memory's peak"]) == (("2,500",), ("52.1%",))
    assert "GFLOP/s" not in found


@pytest.mark.parametrize(("peak_flops", "bound"), [(7e12, True), (6e12, False)])
def test_the_devices_peaks_tell_what_bounds_a_workload(peak_flops, bound):
    result = make_result("filter1d:1000000000,k25", peak_flops=peak_flops, peak_bandwidth=1e12)  # 6.25 FLOP/byte
    assert result.is_memory_bound == bound


def test_a_failed_row_has_dashes_and_a_note_with_the_reason():
    result = make_result(CONVOLUTION, timed("default", 1000), make_row("tiling", failure="it does not compile"))
    assert columns(result)["GFLOP/s"][1] == "—"
    assert "tiling failed: it does not compile" in list_notes(result)


def test_nothing_timed_is_still_a_table():
    assert "default failed: broken" in format_result(make_result(CONVOLUTION, make_row("default")))


FAST = make_result(CONVOLUTION, timed("default", 70, speedup=1.0), timed("tiling", 17, speedup=4.12))
BROKEN = make_result(CONVOLUTION, timed("default", 267, speedup=1.0), make_row("tiling"))
ALONE = make_result(CONVOLUTION, timed("tiling", 1e6))


@pytest.mark.parametrize(
    ("results", "headers", "rows"),
    [
        ({"16": FAST, "32": BROKEN}, "channels", [["16", "70.0", "17.0 (4.12)"], ["32", "267", "failed"]]),
        ({"a": ALONE, "b": FAST}, "layer", [["a", "—", "1,000,000"], ["b", "70.0", "17.0 (4.12)"]]),
    ],
    ids=["a row a workload", "the naive column is first"],
)
def test_a_sweep_has_a_row_a_workload_and_a_column_a_schedule(results, headers, rows):
    table = make_table(make_sweep(results))
    assert table.headers == [headers, "default [µs]", "tiling [µs] (× default)"]
    assert table.rows == rows


def test_the_last_row_of_a_network_has_the_times_of_all_layers():
    first = make_result(CONVOLUTION, timed("default", 4), timed("tiling", 1, speedup=4.0), timed("cudnn", 1))
    second = replace(first, rows=(*first.rows[:2], make_row("cudnn")))
    table = make_table(make_sweep({"a": first, "b": second}, [3, 1]))
    assert table.rows[-1] == ["all, times their number", "16.0", "4.00 (4.00)", "—"]
    assert len(make_table(make_sweep({"a": first, "b": second})).rows) == 2


def sized(*exponents, **fields):
    """Results of a 1-D filter over sizes 2^exponent, which take 1 ms each and are cold from 2^20 on."""
    return [
        make_result(
            f"filter1d:{1 << exponent},k5",
            timed("basic", 1000, cold=exponent >= 20, bandwidth=1e9, **fields),
            peak_flops=60e12,
            peak_bandwidth=4e12,
        )
        for exponent in exponents
    ]


def test_bandwidths_have_a_row_a_schedule_and_a_column_a_size():
    small, large = sized(18, 20, bandwidth_share=0.25)
    table = make_table(make_sweep({"2^18": small, "2^20": large}))
    assert table.headers == ["GB/s", "2^18 hot", "2^20 cold"]
    assert table.rows == [["basic", "1.00 (25.0%)", "1.00 (25.0%)"]]


def test_sizes_are_drawn_over_elements_beside_the_memorys_peak():
    info = compute_size_info("title", sized(20, 18))
    assert (info.ticks, info.labels) == ((2.0**18, 2.0**20), ("2¹⁸\nhot", "2²⁰\ncold"))
    assert (info.unit, info.peak_rate) == ("GB/s", 4000)
    assert [(line.name, line.y) for line in info.series] == [("basic", (1.0, 1.0))]


def test_a_chart_of_numbers_has_a_line_a_schedule():
    results = [make_result(CONVOLUTION, timed("default", 1000, gflops=gflops)) for gflops in (2.0, 3.0)]
    info = compute_sweep_info("title", "channels", ["16", "32"], results)
    assert info.is_log_x
    assert [(line.name, line.x, line.y) for line in info.series] == [("default", (16.0, 32.0), (2.0, 3.0))]


def test_a_chart_of_names_puts_them_side_by_side():
    info = compute_sweep_info("title", "layer", ["conv1", "conv2"], [make_result(CONVOLUTION)] * 2)
    assert (info.is_log_x, info.ticks) == (False, (0.0, 1.0))


CONVOLUTIONS = ("conv2d:1x4x6x6,8x4x3x3,p1", "conv2d:1x2x6x6,8x2x1x1")
FILTERS = ("filter2d:64x64x1,3x3", "filter2d:64x64x3,5x5")


@pytest.mark.parametrize(
    ("texts", "subject"),
    [
        (CONVOLUTIONS, "Convolutions of suite s"),
        (FILTERS, "Filters of suite s"),
        ((CONVOLUTIONS[0], FILTERS[0]), "Workloads of suite s"),
        (("filter1d:100,k5", "filter1d:200,k5"), "filter1d:k5"),
    ],
)
def test_a_chart_is_titled_by_what_was_computed(texts, subject):
    sweep = make_sweep({text: make_result(text, make_row("basic")) for text in texts}, name="s")
    assert make_title(sweep) == f"{subject}, float32, on a GPU"


@given(st.floats(1e-6, 1e9))
def test_significant_digits_are_within_half_a_percent(value):
    assert math.isclose(float(format_significant(value).replace(",", "")), value, rel_tol=5e-3)


@pytest.mark.parametrize(("value", "text"), [(0.12345, "0.123"), (1.5, "1.50"), (76.04, "76.0"), (17858.3, "17,858")])
def test_significant_digits_are_never_in_exponents(value, text):
    assert format_significant(value) == text


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
