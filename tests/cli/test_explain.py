"""`tvmconv explain`: a page from a kernel's code alone."""

import contextlib
import io
import os
import re

import pytest

import tvmconv as tc
from tvmconv.cli import main
from tvmconv.logs.packaged import packaged_logs

SMALL = "conv2d:1x16x16x16,16x16x3x3,s1,p1"


@pytest.fixture(scope="module")
def page():
    """What is printed of one kernel."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["explain", SMALL, "tiling", "--arch", "sm_90"]) == 0
    return out.getvalue()


def test_a_page_on_one_kernel(page):
    assert re.search(r"occupancy +\d+ blocks of \d+ warps, \d+% of 64 warps; decided by [a-z ]+ \(", page)
    assert re.search(
        r"shared +padded_shared +load +4 +\d+ +(\d+×)?LDS(\.\d+)?( \d+×LDS\S*)* +1 +[\d,]+ +[\d,]+ +wavefronts", page
    )
    assert re.search(r"global +X +load +4 +\d+ +(\d+×)?LDG +1 +[\d,]+ +[\d,]+ +sectors", page)
    assert re.search(r"On NVIDIA H200, bound by [a-z0-9A-Z ]+:", page)
    lines = [line.split() for line in page.rpartition("estimate [µs]\n")[2].partition("\n\n")[0].splitlines()]
    estimates = [float(cells[-1]) for cells in lines]
    assert estimates == sorted(estimates, reverse=True)
    assert len(estimates) == 5
    assert all(float(cells[-2]) <= float(cells[-1]) for cells in lines if cells[-2] != "—")
    assert [cells[0] for cells in lines if cells[-2] == "—"] == ["launch", "memory"]


def test_the_predicted_time_has_its_parts_and_its_range(page):
    _, _, told = page.partition("\npredicted ")
    time, low, high = map(float, re.search(r"([\d.]+) µs \(.* between ([\d.]+) and ([\d.]+)\)", told).groups())
    assert low < time < high
    alone, adds = zip(*re.findall(r"^[a-zA-Z0-9 ]+? +([\d.]+) +([\d.]+)  \w", told, re.MULTILINE), strict=True)
    assert 0 < float(alone[0]) < time
    assert sum(map(float, adds)) == pytest.approx(time - 1.5, rel=0.02)  # of the launch


def test_no_time_is_predicted_of_what_tma_and_wgmma_do(capsys):
    assert main(["explain", "conv2d:1x64x16x16,128x64x1x1,s1,p0,f16,nhwc", "hopper", "--arch", "sm_90"]) == 0
    told = re.search(r"No time is predicted.* hopper itself estimates ([\d.]+) µs", capsys.readouterr().out)
    assert 2 < float(told[1]) < 10


@pytest.mark.slow
def test_one_step_of_each_knob(capsys):
    """The unchanged kernel comes first, then kernels that differ in one knob, the fastest first."""
    words = ["explain", "conv2d:1x2x2x4,2x2x1x3,s1,p1", "tiling", "--arch", "sm_90", "--sensitivity"]
    assert main([*words, "--set", "tile_rw=-1,1,3"]) == 0
    _, _, table = capsys.readouterr().out.partition("One step of a knob")
    table, _, governing = table.partition("Knobs with the largest effect")
    assert re.search(r"  load of \w+, \w+ memory: tile_\w+=\S+ makes [\d,]+ \w+ of [\d,]+", governing)
    lines = [line.split() for line in table.splitlines()[2:]]
    assert lines[0][0] == "unchanged"
    speedups = [float(line[-5]) for line in lines]
    assert speedups[0] == 1.0
    assert speedups[1:] == sorted(speedups[1:], reverse=True)
    names = [line[0] for line in lines[1:]]
    assert {"tile_c", "tile_h", "tile_w", "tile_rc"} <= set(names)
    assert max(map(names.count, names)) <= 2


@pytest.mark.slow
def test_steps_that_make_no_kernel_are_left_out(capsys):
    """Of the tile's heights 1 and 2, one would make 1,792 threads."""
    tiles = ("tile_c=-1,64,1", "tile_h=-1,1,1", "tile_w=-1,14,4")
    words = ["explain", "conv2d:1x64x56x56,64x64x3x3,s1,p1", "tiling", "--arch", "sm_90", "--sensitivity"]
    assert main([*words, *(word for tile in tiles for word in ("--set", tile))]) == 0
    _, _, table = capsys.readouterr().out.partition("One step of a knob")
    names = [line.split()[0] for line in table.splitlines()[2:] if line]
    assert names.count("tile_h") == 1


def test_the_tuned_kernel_beside_another_and_why_it_is_faster(capsys):
    words = ["explain", "filter1d:16777216,k5", "basic", "tuned", "--arch", "sm_90"]
    assert main(words) == 0
    page = capsys.readouterr().out
    table = page.partition("part of the predicted time")[2].partition("\n\n")[0].splitlines()[1:]
    shares = [[float(cell) for cell in re.findall(r" ([\d.]+)(?= )", line)[:2]] for line in table]
    assert re.match(r"launches +1\.50 +1\.50 ", table[-1])
    predicted = [float(cell) for cell in re.search(r"predicted \[µs\] +([\d.]+) +([\d.]+)", page).groups()]
    assert [sum(column) for column in zip(*shares, strict=True)] == pytest.approx(predicted, rel=0.02)
    changes = [abs(first - other) for first, other in shares[:-1]]
    assert changes == sorted(changes, reverse=True)
    speedup, cause, change = re.search(
        r"tuned is predicted to be ([\d.]+) × as fast as basic: (.+?) ([-+]\S+) µs", page
    ).groups()
    assert float(speedup) == pytest.approx(predicted[0] / predicted[1], rel=0.02)
    assert table[0].startswith(cause)
    assert float(change) == pytest.approx(shares[0][1] - shares[0][0], rel=0.05)


def test_differing_knobs_of_one_schedule_are_printed(capsys):
    names = ["tiling", "tiling:tile_rc=-1,1,8", "tiling:tile_rc=-1,2,2:tile_rw=-1,3,1"]
    assert main(["explain", SMALL, *names, "--arch", "sm_80"]) == 0
    told = capsys.readouterr().out.partition("\n\n")[0].splitlines()[1:]
    assert [line.partition(": ")[0] for line in told[:1]] == ["tiling"]
    assert {word.partition("=")[0] for line in told for word in line.split()[1:] if "=" in word} == {
        "tile_rc",
        "tile_rw",
    }
    assert told[1].endswith(": tiling tile_rc=-1,1,8 " + told[0].split()[-1])
    assert told[2].endswith(": tiling tile_rc=-1,2,2 tile_rw=-1,3,1")


def test_a_fastest_kernel_is_shown_as_it_is_built(capsys):
    workload, log = "filter1d:16777216,k5", str(packaged_logs()[0].parents[1])
    with pytest.warns(tc.FallbackWarning):  # the log is of a GPU, not of an architecture
        built = tc.build(tc.parse(workload), "register", arch="sm_90", log=log)
    words = ["show", workload, "register:tuned", "--arch", "sm_90"]
    assert main([*words, "--log", log, "--full"]) == 0
    assert capsys.readouterr().out == built.source + "\n"
    assert main([*words, "--set", "threads_x=32", "--full"]) == 0
    other = tc.build(built.workload, "register", arch="sm_90", config={**built.config, "threads_x": 32})
    assert capsys.readouterr().out == other.source + "\n" != built.source + "\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([SMALL, "tilling", "--arch", "sm_90"], "no schedule 'tilling'"),
        ([SMALL, "tiling", "--device", "opencl:0"], "opencl:0 is not an NVIDIA architecture"),
        ([SMALL, "tuned"], f"the logs that come with tvmconv: no record of {SMALL} on a device like sm_90"),
        ([SMALL, "tiling:tuned"], f"no record of {SMALL} by tiling on"),
        ([SMALL, "tiling:tile_rc"], "expected KNOB=VALUE, such as tile_w=-1,2,16,2, not 'tile_rc'"),
        ([SMALL, "tiling:tile_rq=1"], "no knob 'tile_rq'"),
        ([SMALL, "--arch", "sm_75"], f"no prediction for {SMALL} on sm_75"),
        ([SMALL, "--log", os.devnull], f"{os.devnull}: no record of {SMALL} on a device like sm_90"),
        ([SMALL, "--waterfall"], "--waterfall takes one schedule"),
        ([SMALL, "predicted", "--arch", "sm_75"], f"no prediction for {SMALL} on sm_75"),
        (
            [SMALL, "tiling", "--arch", "sm_80", "--sensitivity"],
            "--sensitivity takes one schedule, and a GPU whose peak rates are known",
        ),
    ],
)
def test_a_mistake_is_one_line(words, line, capsys):
    assert main(["explain", *words]) == 2
    told = capsys.readouterr()
    assert line in told.err
    assert not told.out


@pytest.mark.slow
def test_the_way_from_the_default_to_the_best_of_a_log(capsys):
    """Each line changes a knob, and the last one is the config that was measured."""
    words = ["explain", "filter1d:16777216,k5", "register", "--arch", "sm_90", "--waterfall"]
    assert main(words) == 0
    page = capsys.readouterr().out
    lines = page.partition("sectors\n")[2].partition("\n\n")[0].splitlines()
    assert lines[0].startswith("the default config")
    assert all("=" in line.split()[0] for line in lines[1:])
    assert re.search(r"memory +33\.\d ", lines[-1])
