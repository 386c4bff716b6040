"""How soon searches are as fast as a library, and nearly as fast as they get."""

from tvmconv.cli import main
from tvmconv.devices import Timing
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.log import Log
from tvmconv.logs.record import Record
from tvmconv.reports.sweep import write_numbers
from tvmconv.reports.time_to_target import make_time_to_target_table
from tvmconv.workloads import parse

FIRST, SECOND, OTHER = (parse(f"conv2d:1x{channels}x6x6,4x{channels}x1x1") for channels in (2, 4, 8))


def record(workload, micros, elapsed):
    times = (micros * 1e-6,) if micros else ()
    return Record(workload, "direct", {}, "a GPU", "cuda", times=times, elapsed=elapsed)


def compared(name="mine-tuned"):
    """The library takes 10 µs for either of two layers."""
    rows = (
        ResultRow("tuned", timing=Timing((1e-6,), "by hand", False)),
        ResultRow("cudnn", timing=Timing((1e-5,), "", False)),
    )
    results = [Result(workload, "cuda:0", "a GPU", 0, rows) for workload in (FIRST, SECOND)]
    return Sweep(name, ["a", "b"], results, "here", [1, 1])


QUICK = [
    record(FIRST, 12, 1.0),
    record(FIRST, 9, 2.0),
    record(FIRST, 4.1, 3.0),
    record(FIRST, 4, 8.0),
    record(SECOND, 10, 0.5),
    record(SECOND, 10, 2.0),
    record(OTHER, 1, 0.1),  # in no comparison
]
SLOW = [record(FIRST, 11, 5.0), record(FIRST, 0, 6.0), record(SECOND, 10.4, 4.0), record(SECOND, 11, None)]


def test_a_line_tells_how_many_layers_arrive_and_when():
    table = make_time_to_target_table({"quick": QUICK, "slow": SLOW}, [compared()])
    assert table.rows == [
        ("cudnn's speed", "quick", "2", "2", "1.25", "2.00", "5.00"),
        ("cudnn's speed", "slow", "2", "0", "—", "—", "4.50"),
        ("95% of the best", "quick", "2", "2", "1.75", "3.00", "5.00"),
        ("95% of the best", "slow", "2", "1", "—", "4.00", "4.50"),
    ]


def test_the_best_is_that_of_any_search():
    rows = make_time_to_target_table({"quick": QUICK, "slow": [*SLOW, record(FIRST, 2, 9.0)]}, [compared()]).rows
    assert rows[2] == ("95% of the best", "quick", "2", "1", "—", "0.500", "5.00")


def test_the_benchmark_reads_logs_and_comparisons_and_writes_a_page(tmp_path, capsys):
    log = Log(tmp_path / "quick.jsonl")
    for each in QUICK:
        log.append(each)
    write_numbers(compared(), tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!-- reach -->\nold\n<!-- /reach -->\n")
    command = [
        "bench",
        "time-to-target",
        str(tmp_path / "quick.jsonl"),
        "--comparisons",
        str(tmp_path / "mine-tuned.json"),
        "--update-page",
        str(page),
    ]
    assert main(command) == 0
    assert "| cudnn's speed | quick | 2 | 2 | 1.25 | 2.00 | 5.00 |" in page.read_text()
    assert "old" not in page.read_text()
    assert main([*command[:-1], str(tmp_path / "no.md")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
