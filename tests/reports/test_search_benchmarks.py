"""Tables of searches: how soon they reach a library's speed, and which kind of schedule is the fastest where."""

import pytest
from made_results import make_record, make_result, make_row, make_sweep

from tvmconv.benchmarks.time_to_target import make_time_to_target_table
from tvmconv.benchmarks.winners import compare_layers, draw_winners, make_layers_table, make_networks_table
from tvmconv.cli import main
from tvmconv.logs.log import Log
from tvmconv.reports.sweep import write_numbers
from tvmconv.workloads import parse

FIRST, SECOND, OTHER = (parse(f"conv2d:1x{channels}x6x6,4x{channels}x1x1") for channels in (2, 4, 8))
TIMES = make_row("tuned", 1), make_row("cudnn", 10)  # of either of two layers
COMPARED = make_sweep({"a": make_result(FIRST.text, *TIMES), "b": make_result(SECOND.text, *TIMES)}, [1, 1])
QUICK = [
    make_record(workload, micros, elapsed=elapsed)
    for workload, micros, elapsed in (
        *((FIRST, 12, 1.0), (FIRST, 9, 2.0), (FIRST, 4.1, 3.0), (FIRST, 4, 8.0)),
        *((SECOND, 10, 0.5), (SECOND, 10, 2.0), (OTHER, 1, 0.1)),  # the last is in no comparison
    )
]
SLOW = [
    make_record(workload, micros, elapsed=elapsed)
    for workload, micros, elapsed in ((FIRST, 11, 5.0), (FIRST, 0, 6.0), (SECOND, 10.4, 4.0), (SECOND, 11, None))
]


def test_a_row_tells_how_many_layers_arrive_and_when():
    table = make_time_to_target_table({"quick": QUICK, "slow": SLOW}, [COMPARED])
    assert table.rows == [
        ("cudnn's speed", "quick", "2", "2", "1.25", "2.00", "5.00"),
        ("cudnn's speed", "slow", "2", "0", "—", "—", "4.50"),
        ("95% of the best", "quick", "2", "2", "1.75", "3.00", "5.00"),
        ("95% of the best", "slow", "2", "1", "—", "4.00", "4.50"),
    ]


def test_the_best_is_that_of_any_search():
    searches = {"quick": QUICK, "slow": [*SLOW, make_record(FIRST, 2, elapsed=9.0)]}
    rows = make_time_to_target_table(searches, [COMPARED]).rows
    assert rows[2] == ("95% of the best", "quick", "2", "1", "—", "0.500", "5.00")


SMALL, BIG, UNCOMPARED = (parse(f"conv2d:{n}x{c}x16x16,{c}x{c}x3x3,s1,p1") for n, c in ((1, 8), (32, 64), (2, 8)))
CUDNN = make_row("cudnn", 8, error=3e-7), make_row("cudnn", 5, error=1e-7)
LAYERS = {
    "net a b1": (SMALL, make_row("tuned", 4, error=2e-7, gflops=500, schedule="direct"), CUDNN[0]),
    "net a b32": (BIG, make_row("tuned", 10, error=4e-6, gflops=9e4, schedule="winograd"), CUDNN[1]),
    "net b b2": (UNCOMPARED, make_row("tuned", 10, schedule="winograd")),
}
SWEEP = make_sweep({label: make_result(w.text, *rows) for label, (w, *rows) in LAYERS.items()}, name="mine")
RECORDS = [
    make_record(SMALL, 6, "winograd"),
    make_record(SMALL, 5, "winograd"),
    make_record(SMALL, 4.5, "direct"),  # slower than it was beside the library
    make_record(BIG, 30, "direct"),
    make_record(BIG, 25, "tiling"),
    make_record(BIG, 0, "winograd"),  # failed
    make_record(UNCOMPARED, 1, "direct"),
]


@pytest.fixture
def layers():
    return compare_layers([SWEEP], RECORDS, ["winograd"])


def test_each_kind_has_the_time_of_its_fastest_schedule(layers):
    assert [dict(layer.seconds_by_kind) for layer in layers] == [
        pytest.approx({"others": 4e-6, "winograd": 5e-6}),
        pytest.approx({"others": 25e-6, "winograd": 10e-6}),
    ]
    winners = [(layer.winner, layer.lead_ratio) for layer in layers]
    assert winners == [("others", pytest.approx(1.25)), ("winograd", pytest.approx(2.5))]


def test_a_layer_has_times_rates_and_errors(layers):
    assert make_layers_table(layers, ["winograd"]).rows[1] == (
        *("net a b32", f"`{BIG}`", "winograd", "10.0", "5.00", "0.500", "90.0", "4.0e-06", "1.0e-07"),
        *("10.0", "25.0"),
    )


def test_networks_are_told_apart_by_batch(layers):
    assert make_networks_table(layers).rows == [
        ("net", "1", "1", "2.00", "2.00", "0", "0.500", "2.0e-07", "3.0e-07"),
        ("net", "32", "1", "0.500", "0.500", "1", "90.0", "4.0e-06", "1.0e-07"),
        ("all", "", "2", "1.00", "0.500", "1", "90.0", "4.0e-06", "3.0e-07"),
    ]


def test_the_picture_has_a_panel_for_each_size_of_batch(layers, tmp_path):
    draw_winners(layers, ["winograd"], tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert all(f"<!-- {shown} -->" in text for shown in ("batch 1", "batch 32", "2.5"))


@pytest.fixture
def run_bench(tmp_path):
    """Run a benchmark of tables on a sweep and on records, and return the section that it writes into a page."""

    def run(section, sweep, records, make_words):
        write_numbers(sweep, tmp_path)
        log, page = tmp_path / "mine.jsonl", tmp_path / "page.md"
        for record in records:
            Log(log).append(record)
        page.write_text(f"# Mine\n\n<!-- {section} -->\nold\n<!-- /{section} -->\n", encoding="utf-8")
        words = make_words(str(log), str(tmp_path / f"{sweep.name}.json"))
        assert main(["bench", *words, "--update-page", str(page)]) == 0
        assert "old" not in page.read_text(encoding="utf-8")
        return page.read_text(encoding="utf-8")

    return run


def test_time_to_target_reads_logs_and_writes_a_page(run_bench, tmp_path, capsys):
    def words(log, sweep):
        return ["time-to-target", log, "--comparisons", sweep]

    page = run_bench("reach", COMPARED, QUICK, words)
    assert "| cudnn's speed | mine | 2 | 2 | 1.25 | 2.00 | 5.00 |" in page
    missing = ["--update-page", str(tmp_path / "no.md")]
    assert main(["bench", *words(str(tmp_path / "mine.jsonl"), str(tmp_path / "mine-tuned.json")), *missing]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_winners_writes_page_picture_and_section(run_bench, tmp_path, capsys):
    def words(log, sweep):
        return ["winners", sweep, "--kind", "winograd", "--log", log, "-o", str(tmp_path / "out")]

    assert "| net | 32 |" in run_bench("winners", SWEEP, RECORDS, words)
    assert "net" in capsys.readouterr().out
    assert f"`{BIG}`" in (tmp_path / "out.md").read_text(encoding="utf-8")
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert main(["bench", "winners", str(tmp_path / "mine.jsonl")]) == 2
