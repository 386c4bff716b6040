"""`tvmconv counters`: kernels that are built and counted without a GPU, and what one says of them."""

import gzip
import json
import zipfile
from dataclasses import replace

import pytest

import tvmconv as tc
from tvmconv import cli
from tvmconv.experiments.counter_comparison import CounterComparison
from tvmconv.experiments.kernel_metrics import KernelMetricsFile
from tvmconv.measure import kernel_archive
from tvmconv.reports.counter_comparison import compute_ratio, iterate_differing, make_summary_table, make_table

SMALL = "conv2d:1x4x8x8,16x4x3x3,p1"
ROW = CounterComparison(
    SMALL,
    "tiling",
    {},
    0,
    {"counts": {"global_load_sectors": 10000.0}, "limits": {}, "occupancy": 0.5, "registers": 32},
    {"global_load_sectors": 10100.0, "global_store_sectors": 500.0, "occupancy_percent": 50.0},
)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("counters") / "kernels.zip"
    words = ["counters", SMALL, "--schedules", "tiling", "--arch", "sm_90", "--kernel-archive", str(file)]
    assert cli.main(words) == 0
    return file


def test_kernels_are_kept_with_what_is_counted_of_them(file):
    kept = list(kernel_archive.load_kernels(file))
    assert [told["schedule"] for told, _ in kept] == ["default", "tiling"]
    told, program = kept[1]
    assert len(told["steps"]) == len(program.kernels) == 1
    assert told["steps"][0]["counts"]["shared_load_wavefronts"] > 0


def test_a_damaged_file_of_kernels_is_one_line(file, tmp_path):
    data = file.read_bytes()
    damaged = tmp_path / "damaged.zip"
    place = data.index(b"0.bin") + 100
    damaged.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) * 40 + data[place + 40 :])
    with pytest.raises(tc.Error, match=r"cannot read .*damaged\.zip"):
        list(kernel_archive.load_kernels(damaged))
    with zipfile.ZipFile(damaged, "w") as archive:
        archive.writestr("0.json", json.dumps({"told": {}, "program": json.dumps({"codes": {}, "steps": [1]})}))
        archive.writestr("0.bin", b"")
    with pytest.raises(tc.Error, match=r"cannot read .*damaged\.zip"):
        list(kernel_archive.load_kernels(damaged))


@pytest.mark.parametrize("words", [(), (SMALL,), ("--kernel-archive", "x.zip")])
def test_without_a_gpu_both_are_needed(words, capsys):
    assert cli.main(["counters", *words, "--arch", "sm_90"]) == 2
    assert "expected workloads and --kernel-archive FILE" in capsys.readouterr().err


def test_readings_are_shown_again(tmp_path, capsys):
    file = tmp_path / "counters.json"
    told = {"name": "counters", "provenance": "a GPU, that day", "kernels": [vars(ROW)]}
    file.write_text(json.dumps(told))
    assert cli.main(["counters", "--from", str(file), "--all"]) == 0
    out = capsys.readouterr().out
    assert "0.990" in out
    assert "a GPU, that day" in out


def many_accesses(count):
    """A row of so many accesses, the first of which is counted at 1.5 times what was measured, the second at half."""
    factors = [1.5, 0.5] + [1.0] * (count - 2)
    return replace(
        ROW,
        accesses=[
            {
                "space": "global",
                "kind": "load",
                "arrays": [f"X{number}"],
                "line": number,
                "rows": 1,
                "counts": {"sectors": 1000.0 * factor},
                "measured": {"sectors": 1000},
            }
            for number, factor in enumerate(factors)
        ],
    )


@pytest.mark.parametrize("words", [[], ["--all"]])
def test_a_summary_lists_only_the_accesses_that_differ(words, tmp_path, capsys):
    file = tmp_path / "counters.json"
    file.write_text(json.dumps({"name": "counters", "provenance": "a GPU", "kernels": [vars(many_accesses(500))]}))
    assert cli.main(["counters", "--from", str(file), *words]) == 0
    out = capsys.readouterr().out
    assert ("load of X499, global" in out) == bool(words)
    assert out.index("load of X1, global") < out.index("load of X0, global") or words
    assert len(out.splitlines()) < 40 or words
    assert ("498 of 500" in out) == (not words)
    assert ("--all prints each of the 500 accesses" in out) == (not words)


def test_a_count_that_neither_has_is_no_share():
    assert compute_ratio(ROW, "shared_load_wavefronts") is None


def test_the_summary_counts_those_that_agree():
    lines = {line[0]: line[1:] for line in make_summary_table([ROW]).rows}
    assert lines["sectors, loads"] == ("2%", "1", "1", "100.0%")
    assert lines["sectors, stores"] == ("2%", "1", "0", "0.0%")
    assert lines["sectors and wavefronts"] == ("2%", "1", "0", "0.0%")
    assert lines["occupancy"] == ("0%", "1", "1", "100.0%")


def test_the_source_view_counts_where_it_was_taken():
    """The metrics of whole launches leave out asynchronous copies."""
    access = {"space": "global", "kind": "load", "counts": {"sectors": 30000.0}, "measured": {"sectors": 20000}}
    assert compute_ratio(replace(ROW, accesses=[access, access]), "global_load_sectors") == 1.5


def test_bytes_from_memory_may_differ_by_a_tenth():
    counts = {"dram_read_bytes": 1e6, "dram_write_bytes": 2e6}
    measured = {"dram_read_bytes": 1.08e6, "dram_write_bytes": 1.0e6}
    row = replace(ROW, counted={"counts": counts}, measured=measured)
    assert [names for _, names in iterate_differing([row])] == [["DRAM, all"]]
    fits = replace(row, counted={"counts": {"dram_read_bytes": 1e6}})
    assert compute_ratio(fits, "dram_bytes") is None
    assert list(iterate_differing([fits])) == []


def test_kernels_are_counted_anew_beside_what_was_measured(tmp_path, capsys):
    """Of two files, together; what was measured stays."""
    access = {"space": "shared", "kind": "load", "line": None, "measured": {"wavefronts": 7}}
    access |= {"arrays": ["X.shared"], "counts": {"wavefronts": 7.0}, "rows": 1}
    files = []
    for number, config in enumerate(({}, {"tile_rc": [-1, 1, 2]})):
        whole = tc.build(tc.parse(SMALL), "tiling", arch="sm_90", config=config).config
        row = replace(ROW, config=dict(whole), counted={"error": "unknown"}, accesses=[access])
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps({"name": "counters", "provenance": "a GPU", "kernels": [vars(row)]}))
    words = ["counters", "--recount", *(word for file in files for word in ("--from", str(file)))]
    assert cli.main([*words, "-o", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    rows = KernelMetricsFile.read(tmp_path / "out" / "counters.json", CounterComparison).kernels
    assert rows[0].config != rows[1].config
    assert all(row.counted["counts"]["shared_load_wavefronts"] > 0 for row in rows)
    assert all(row.measured == ROW.measured for row in rows)


def test_what_the_gpu_does_not_count_at_all_is_shown():
    row = replace(ROW, measured={**ROW.measured, "global_load_sectors": 0.0})
    assert "∞" in make_table([row]).format_text()


@pytest.mark.parametrize(
    "data", [b"no archive", gzip.compress(b"{}")[:-4], gzip.compress(b"[]")], ids=["none", "cut off", "a list"]
)
def test_damaged_compressed_readings_are_refused_by_name(data, tmp_path, capsys):
    file = tmp_path / "counters.json.gz"
    file.write_bytes(data)
    assert cli.main(["counters", "--from", str(file)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "counters.json.gz" in err
