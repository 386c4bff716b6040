"""Nsight Compute: its output as numbers, and our counts beside those that it took on an H200."""

import json
import lzma
from pathlib import Path

import pytest

import tvmconv as tc
from tvmconv.analysis.nsight.ncu import parse_source_view, profile_command
from tvmconv.analysis.nsight.predicted_counters import predict_counters
from tvmconv.analysis.sass.interpreter.request_counts import count_launch_requests
from tvmconv.errors import DeviceError, Error
from tvmconv.experiments.counter_comparison import CounterComparison, compare_accesses
from tvmconv.reports.counter_comparison import make_access_table
from tvmconv.reports.tables import EMPTY_CELL

METRICS = {"read": "dram__bytes_read.sum", "stall": "smsp__stall.ratio", "unknown": "no__such_metric.sum"}
ANSWER = """==PROF== Connected to process 42
"ID","Kernel Name","dram__bytes_read.sum","smsp__stall.ratio","no__such_metric.sum"
"","","byte","warp",""
"0","main_kernel","1,048,576","2.50","n/a"
"1","main_kernel","32","0","n/a"
"""


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Put a stand-in for ncu on the PATH, which keeps what it was asked, prints an answer and exits."""

    def install(answer="", status=0, complaint=""):
        script = tmp_path / "ncu"
        (tmp_path / "answer").write_text(answer)
        script.write_text(
            f'#!/bin/sh\necho "$@" >{tmp_path}/asked\ncat {tmp_path}/answer\necho "{complaint}" >&2\nexit {status}\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return tmp_path / "asked"

    return install


def test_each_launch_has_its_metrics_by_name(ncu):
    ncu(ANSWER)
    assert list(profile_command(["program"], METRICS)) == [{"read": 1048576, "stall": 2.5}, {"read": 32, "stall": 0}]


def test_ncu_is_asked_for_the_metrics_of_a_command(ncu):
    asked = ncu(ANSWER)
    list(profile_command(["program", "--option"], METRICS))
    words = asked.read_text().split()
    assert words[-2:] == ["program", "--option"]
    assert words[words.index("--metrics") + 1] == ",".join(METRICS.values())


def test_a_failure_is_told_by_ncus_last_line(ncu):
    ncu(status=1, complaint="ERR_NVGPUCTRPERM: no permission to read the counters")
    with pytest.raises(DeviceError, match="ncu failed: ERR_NVGPUCTRPERM: no permission"):
        list(profile_command(["program"], METRICS))


def test_where_ncu_is_missing_the_remedy_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="install Nsight Compute"):
        list(profile_command(["program"], METRICS))


COUNTERS = sorted((Path(__file__).parents[2] / "tuning_logs" / "nvidia-h200").glob("*/filter*-counters.json"))
MEASURED = [row for file in COUNTERS for row in json.loads(file.read_text())["kernels"]]
ROWS = [row for row in MEASURED if row["schedule"] != "register"]  # whose text is long
QUICK = ("halo_blocks", "halo_strided", "shuffle")


def name(row):
    return f"{row['workload'].partition(':')[0]}-{row['schedule']}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=name(row), marks=[] if row["schedule"] in QUICK else pytest.mark.slow) for row in ROWS],
)
def test_sectors_and_requests_are_those_that_a_gpu_counted(row):
    kernel = tc.build(tc.parse(row["workload"]), row["schedule"], arch="sm_90")
    for name, count in predict_counters(kernel, kernel.kernels[0]).counts.items():
        if name.startswith("global"):
            assert count == pytest.approx(row["metrics"][name], rel=0.01), name


FILE = Path(__file__).parents[1] / "data" / "ncu_source.csv.xz"
TILES = {"sliced_k": 1, "pipeline": "none", "copy_order": "contiguous", "weight_layout": "oihw", "weight_pad": 0}
UNROLLED = {"auto_unroll_max_step": 0, "unroll_explicit": 0}
KERNELS = {
    "conv2d:4x256x14x14,512x256x1x1,s1,p0,f16,nhwc": {"tile_f": [-1, 1, 8, 4], "tile_p": [-1, 1, 31, 2]},
    "conv2d:1x96x56x56,96x1x7x7,s1,p3,g96,f16,nhwc": {"tile_f": [-1, 1, 1, 1], "tile_p": [-1, 1, 32, 2]},
}
TAPS = {
    "conv2d:4x256x14x14,512x256x1x1,s1,p0,f16,nhwc": {"tile_rc": [-1, 8], "tile_ry": [-1, 1], "tile_rx": [-1, 1]},
    "conv2d:1x96x56x56,96x1x7x7,s1,p3,g96,f16,nhwc": {"tile_rc": [-1, 1], "tile_ry": [-1, 1], "tile_rx": [-1, 7]},
}
ATTEMPTS = 5  # to get the same code of NVRTC, which makes other code one time in ten


@pytest.fixture(scope="module")
def launches():
    return parse_source_view(lzma.open(FILE, "rt", encoding="utf-8"))


@pytest.fixture(
    scope="module",
    params=[pytest.param(0, id="branches", marks=pytest.mark.slow), pytest.param(1, id="depthwise")],
)
def joined(request, launches):
    text, launch = list(KERNELS)[request.param], launches[request.param]
    for _ in range(ATTEMPTS):
        config = KERNELS[text] | TAPS[text] | TILES | UNROLLED
        kernel = tc.build(tc.parse(text), "implicit_gemm", arch="sm_90", config=config)
        (step,) = kernel.kernels
        if [each.name for each in kernel.listings[step.name]] == [_name(each.text) for each in launch]:
            plain = predict_counters(kernel, step).to_json()
            counts = count_launch_requests(
                kernel.executable.kernels[0], kernel.listings[step.name], "sm_90"
            ).instruction_counts
            return (
                counts,
                CounterComparison(text, "implicit_gemm", config, 0, plain, {}, compare_accesses(plain, launch)),
                launch,
            )
    pytest.skip("this NVRTC makes other machine code than that which was measured")


def _name(text):
    return next(word for word in text.split() if not word.startswith("@"))


def test_each_launch_has_its_instructions_in_order(launches):
    assert list(map(len, launches)) == [184, 168]
    assert all(launch[0].text == "LDC R1, c[0x0][0x28]" for launch in launches)


@pytest.mark.parametrize("row", ['"0x7f00","EXIT"', '"0x7f00","EXIT","many"'])
def test_something_else_is_refused(row):
    with pytest.raises(Error, match="source view"):
        parse_source_view(['"Kernel Name","main_kernel",', '"Address","Source","Instructions Executed"', row])


@pytest.mark.slow
def test_each_instruction_is_counted_as_it_was_measured(joined):
    """How often it ran, too, but where threads that have parted come together: there a GPU waits for some longer."""
    counts, _, launch = joined
    for each, measured in zip(counts, launch, strict=True):
        ours = each.num_sectors, each.num_lines, each.num_wavefronts
        assert ours == (measured.num_sectors, measured.num_tags, measured.num_wavefronts), measured.text
    assert sum(each.num_executed for each in counts) == pytest.approx(
        sum(each.num_executed for each in launch), rel=0.03
    )


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["wavefronts", "sectors", "tags"])
def test_all_that_was_measured_is_of_an_access(joined, unit):
    _, row, launch = joined
    counted = sum(each["measured"].get(unit, 0) for each in row.accesses)
    assert counted == sum(getattr(each, f"num_{unit}") for each in launch)


@pytest.mark.slow
def test_the_table_names_each_access_with_its_line(joined):
    _, row, _ = joined
    table = make_access_table([row])
    assert len(table.rows) == len(row.accesses)
    assert all(line[2] != EMPTY_CELL and float(line[-1]) == 1 for line in table.rows)
