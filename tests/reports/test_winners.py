"""Which kind of schedule wins on which layers."""

from pathlib import Path

import pytest

from tvmconv.cli import main
from tvmconv.devices import Timing
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.log import Log
from tvmconv.logs.record import Record
from tvmconv.reports.sweep import write_numbers
from tvmconv.reports.winners import compare_layers, draw_winners, make_layers_table, make_networks_table
from tvmconv.workloads import parse

ROOT = Path(__file__).parents[2]
SMALL, LARGE, UNCOMPARED = (parse(f"conv2d:{n}x{c}x16x16,{c}x{c}x3x3,s1,p1") for n, c in ((1, 8), (32, 64), (2, 8)))


def row(name, micros, error=1e-6, gflops=None, schedule=None):
    return ResultRow(name, True, error, timing=Timing((micros * 1e-6,), "", False), gflops=gflops, schedule=schedule)


def record(workload, schedule, micros):
    return Record(workload, schedule, {}, "a GPU", "cuda", times=(micros * 1e-6,) if micros else ())


SWEEP = Sweep(
    "mine",
    ["net a b1", "net a b32", "net b b2"],
    [
        Result(SMALL, "cuda:0", "a GPU", 0, (row("tuned", 4, 2e-7, 500, "direct"), row("cudnn", 8, 3e-7))),
        Result(LARGE, "cuda:0", "a GPU", 0, (row("tuned", 10, 4e-6, 90e3, "winograd"), row("cudnn", 5, 1e-7))),
        Result(UNCOMPARED, "cuda:0", "a GPU", 0, (row("tuned", 10, schedule="winograd"),)),
    ],
    "here",
)
RECORDS = [
    record(SMALL, "winograd", 6),
    record(SMALL, "winograd", 5),
    record(SMALL, "direct", 4.5),  # slower than it was beside the library
    record(LARGE, "direct", 30),
    record(LARGE, "tiling", 25),
    record(LARGE, "winograd", 0),  # failed
    record(UNCOMPARED, "direct", 1),
]


@pytest.fixture
def found():
    return compare_layers([SWEEP], RECORDS, ["winograd"])


def test_each_kind_has_the_time_of_its_fastest_schedule(found):
    assert [dict(each.seconds_by_kind) for each in found] == [
        pytest.approx({"others": 4e-6, "winograd": 5e-6}),
        pytest.approx({"others": 25e-6, "winograd": 10e-6}),
    ]
    assert [(each.winner, each.lead_ratio) for each in found] == [
        ("others", pytest.approx(1.25)),
        ("winograd", pytest.approx(2.5)),
    ]


def test_a_line_tells_times_rates_and_errors(found):
    assert make_layers_table(found, ["winograd"]).rows[1] == (
        *("net a b32", f"`{LARGE}`", "winograd", "10.0", "5.00", "0.500", "90.0", "4.0e-06", "1.0e-07"),
        *("10.0", "25.0"),
    )


def test_networks_are_told_apart_by_batch(found):
    assert make_networks_table(found).rows == [
        ("net", "1", "1", "2.00", "2.00", "0", "0.500", "2.0e-07", "3.0e-07"),
        ("net", "32", "1", "0.500", "0.500", "1", "90.0", "4.0e-06", "1.0e-07"),
        ("all", "", "2", "1.00", "0.500", "1", "90.0", "4.0e-06", "3.0e-07"),
    ]


def test_the_picture_has_a_panel_for_each_size_of_batch(found, tmp_path):
    draw_winners(found, ["winograd"], tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert "<!-- batch 1 -->" in text
    assert "<!-- batch 32 -->" in text
    assert "<!-- 2.5 -->" in text


def test_the_benchmark_writes_page_picture_and_section(tmp_path, capsys):
    write_numbers(SWEEP, tmp_path)
    log = Log(tmp_path / "mine.jsonl")
    for each in RECORDS:
        log.append(each)
    page = tmp_path / "page.md"
    page.write_text("# Mine\n\n<!-- winners -->\n<!-- /winners -->\n", encoding="utf-8")
    options = ["--kind", "winograd", "--log", str(tmp_path / "mine.jsonl"), "-o", str(tmp_path / "out")]
    assert main(["bench", "winners", str(tmp_path / "mine.json"), *options, "--update-page", str(page)]) == 0
    assert "net" in capsys.readouterr().out
    assert "| net | 32 |" in page.read_text(encoding="utf-8")
    assert f"`{LARGE}`" in (tmp_path / "out.md").read_text(encoding="utf-8")
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert main(["bench", "winners", str(tmp_path / "mine.jsonl")]) == 2
