"""Nsight Compute's source view, of two launches on an H200, joined to what is counted of their kernels.

The data is from `ncu --set none --section SourceCounters python -m tvmconv.experiments.counter_comparison KERNELS
cuda:0` and `ncu --import REPORT --page source --csv`: two of 24 kernels, with all columns.
"""

import lzma
from pathlib import Path

import pytest

import tvmconv as tc
from tvmconv.analysis.nsight.ncu import parse_source_view
from tvmconv.analysis.nsight.predicted_counters import predict_counters
from tvmconv.analysis.sass.interpreter.request_counts import count_launch_requests
from tvmconv.errors import Error
from tvmconv.experiments.counter_comparison import CounterComparison, compare_accesses
from tvmconv.reports.counter_comparison import make_access_table
from tvmconv.reports.tables import EMPTY_CELL

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


def test_each_instruction_is_counted_as_it_was_measured(joined):
    """How often it ran, too, but where threads that have parted come together: there a GPU waits for some longer."""
    counts, _, launch = joined
    for each, measured in zip(counts, launch, strict=True):
        ours = each.num_sectors, each.num_lines, each.num_wavefronts
        assert ours == (measured.num_sectors, measured.num_tags, measured.num_wavefronts), measured.text
    assert sum(each.num_executed for each in counts) == pytest.approx(
        sum(each.num_executed for each in launch), rel=0.03
    )


@pytest.mark.parametrize("unit", ["wavefronts", "sectors", "tags"])
def test_all_that_was_measured_is_of_an_access(joined, unit):
    _, row, launch = joined
    counted = sum(each["measured"].get(unit, 0) for each in row.accesses)
    assert counted == sum(getattr(each, f"num_{unit}") for each in launch)


def test_the_table_names_each_access_with_its_line(joined):
    _, row, _ = joined
    table = make_access_table([row])
    assert len(table.rows) == len(row.accesses)
    assert all(line[2] != EMPTY_CELL and float(line[-1]) == 1 for line in table.rows)
