import json
from dataclasses import replace

import numpy as np
import pytest

from tvmconv import library
from tvmconv.baselines.base import REGISTRY, Baseline
from tvmconv.devices import Arch, Timing
from tvmconv.errors import CompileError, DeviceError, KnobError, ScheduleError
from tvmconv.experiments.results import Result
from tvmconv.experiments.run import choose, left_out, run_ladder
from tvmconv.kernel import Kernel
from tvmconv.workloads import Conv2d, parse

ALL = ["default", "tiling", "columns", "vthread", "conflict_free", "direct", "implicit_gemm"]
ALL += ["winograd", "winograd_fused"]
SMALL = parse("conv2d:1x4x6x6,8x4x3x3,p1")


@pytest.fixture(scope="module")
def ladder(opencl):
    return run_ladder(SMALL, device=opencl, seconds=0.01, seed=1)


def broken(s, w, k):
    k.choice("broken_by", (1, 2), default=1)
    raise CompileError("broken on purpose")


@pytest.fixture
def with_broken(registry):
    """A schedule in the library that never compiles."""
    library.schedule("conv2d")(broken)


@pytest.fixture
def cuda_only(registry):
    """A schedule in the library that is for CUDA alone."""

    def shuffle(s, w, k):
        """Never built here."""

    library.schedule("conv2d", kinds=("cuda",))(shuffle)


def names(result):
    return [row.name for row in result.rows]


def test_without_names_every_schedule_runs_in_order_and_is_verified(ladder):
    assert names(ladder) == ALL
    assert all(row.verified and row.error < 1e-5 and row.timing for row in ladder.rows)
    assert ladder.ok


def test_speedups_are_over_default(ladder):
    default, *others = ladder.rows
    assert default.speedup == 1
    assert all(row.speedup == default.timing.median / row.timing.median for row in others)


def test_rates_are_flops_over_the_median(ladder):
    assert all(row.gflops == pytest.approx(SMALL.flops / row.timing.median / 1e9) for row in ladder.rows)


def test_bandwidths_are_least_bytes_over_the_median(ladder):
    assert all(row.bandwidth == pytest.approx(SMALL.min_bytes / row.timing.median) for row in ladder.rows)


def test_json_round_trip_is_exact(ladder):
    assert Result.from_json(json.loads(json.dumps(ladder.to_json()))) == ladder


def test_json_has_no_nan(opencl, monkeypatch):
    monkeypatch.setattr(Kernel, "__call__", lambda self, *inputs: np.full(SMALL.output_shape, np.nan, "float32"))
    result = run_ladder(SMALL, ["default"], device=opencl, seconds=0.01)
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["rows"][0]["error"] is None


def test_a_named_schedule_runs_with_default_before_it(opencl):
    assert names(run_ladder(SMALL, ["tiling"], device=opencl, seconds=0.01)) == ["default", "tiling"]


def test_each_schedule_takes_the_knobs_that_it_has(opencl):
    result = run_ladder(SMALL, ["tiling"], device=opencl, config={"tile_c": (-1, 2, 2)}, seconds=0.01)
    assert [row.config.get("tile_c") for row in result.rows] == [None, (-1, 2, 2)]


def test_a_knob_that_no_schedule_has_is_refused(opencl):
    with pytest.raises(KnobError, match=r"no knob 'colour' in tiling; there are: tile_c, "):
        run_ladder(SMALL, ["tiling"], device=opencl, config={"colour": 1})


def test_a_value_that_no_schedule_takes_is_refused(opencl):
    with pytest.raises(KnobError, match="tile_c takes 3 factors"):
        run_ladder(SMALL, ["tiling"], device=opencl, config={"tile_c": "banana"})


def test_an_unknown_schedule_is_refused(opencl):
    with pytest.raises(ScheduleError, match="no schedule 'nope'"):
        run_ladder(SMALL, ["tiling", "nope"], device=opencl)


@pytest.mark.usefixtures("with_broken")
def test_a_schedule_that_fails_is_a_row_and_the_others_go_on(opencl):
    result = run_ladder(SMALL, ["broken"], device=opencl, seconds=0.01)
    assert [(row.name, row.failure) for row in result.rows] == [("default", None), ("broken", "broken on purpose")]
    assert not result.ok


def test_what_stops_every_schedule_is_raised():
    with pytest.raises(DeviceError, match="sm_90 is to compile for only"):
        run_ladder(SMALL, device=Arch("sm_90"))


@pytest.mark.usefixtures("cuda_only")
def test_a_schedule_for_other_devices_is_left_out(opencl):
    assert [schedule.name for schedule in choose(SMALL, None, opencl)] == ALL
    assert [schedule.name for schedule in left_out(SMALL, opencl)] == ["shuffle"]


@pytest.mark.usefixtures("cuda_only")
def test_a_schedule_for_other_devices_is_refused_by_name(opencl):
    with pytest.raises(ScheduleError, match="schedule shuffle is for cuda, not for opencl:0"):
        run_ladder(SMALL, ["tiling", "shuffle"], device=opencl)


def test_a_wrong_kernel_is_never_timed(opencl, monkeypatch):
    reference = Conv2d.reference
    monkeypatch.setattr(Conv2d, "reference", lambda w, x, k: reference(w, x, k) + 1)
    monkeypatch.setattr(Kernel, "time", lambda *args, **kwargs: pytest.fail("timed"))
    (row,) = run_ladder(SMALL, ["default"], device=opencl).rows
    assert (row.verified, row.timing) == (False, None)
    assert "wrong result" in row.failure


def test_an_unwritten_element_is_told_as_such(opencl, monkeypatch):
    monkeypatch.setattr(Kernel, "__call__", lambda self, *inputs: np.full(SMALL.output_shape, np.nan, "float32"))
    (row,) = run_ladder(SMALL, ["default"], device=opencl).rows
    assert "NaN" in row.failure


def test_the_cudnn_baseline_is_refused_before_anything_is_built(opencl, monkeypatch):
    monkeypatch.setattr(Kernel, "verify", lambda *args: pytest.fail("verified"))
    with pytest.raises(DeviceError, match="needs an NVIDIA GPU"):
        run_ladder(SMALL, device=opencl, baselines=["cudnn"])


def slow(w, inputs, *, device, cold, seconds):
    return Baseline(Timing((1.0,), "by hand", cold), w.reference(*inputs), "slow 1.0")


def missing(w, inputs, **how):
    raise DeviceError("not installed")


def copying(w, inputs, **how):
    return Baseline(Timing((1.0,), "by hand", cold=False), None, "copy 1.0")


@pytest.fixture
def libraries(monkeypatch):
    """Libraries that need nothing installed."""
    for library_ in (slow, missing, copying):
        monkeypatch.setitem(REGISTRY, library_.__name__, library_)


@pytest.mark.usefixtures("libraries")
def test_libraries_are_the_last_rows_in_the_order_asked_for(opencl):
    result = run_ladder(SMALL, ["default"], device=opencl, seconds=0.01, baselines=["slow", "copying"])
    assert [(row.name, row.library) for row in result.rows[1:]] == [("slow", "slow 1.0"), ("copying", "copy 1.0")]


@pytest.mark.usefixtures("libraries")
def test_a_library_that_is_missing_is_a_row_and_the_others_go_on(opencl):
    result = run_ladder(SMALL, ["default"], device=opencl, seconds=0.01, baselines=["missing", "slow"])
    assert [row.failure for row in result.rows] == [None, "not installed", None]


@pytest.mark.usefixtures("libraries")
def test_what_computes_something_else_has_a_bandwidth_and_no_flops(opencl):
    row = run_ladder(SMALL, ["default"], device=opencl, seconds=0.01, baselines=["copying"]).rows[-1]
    assert (row.verified, row.gflops, row.bandwidth) == (False, None, SMALL.min_bytes)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("cache", "cold"), [(SMALL.min_bytes - 1, True), (SMALL.min_bytes, False), (None, False)])
def test_times_are_cold_by_themselves_where_the_arrays_exceed_the_cache(opencl, cache, cold):
    device = replace(opencl, l2_bytes=cache)
    row = run_ladder(SMALL, ["default"], device=device, seconds=0.01, baselines=["slow"], cold=None).rows[-1]
    assert row.timing.cold == cold


def test_progress_tells_every_step(opencl):
    steps = []
    run_ladder(SMALL, ["default"], device=opencl, seconds=0.01, progress=steps.append)
    assert steps == [f"schedule 1 of 1, default: {step}" for step in ("building", "verifying", "timing")]


@pytest.mark.gpu
def test_rows_on_a_gpu_have_registers_and_a_share_of_the_peak(gpu):
    result = run_ladder(SMALL, device=gpu, seconds=0.01)
    assert all(row.registers and row.spills == 0 and 0 < row.peak_share < 1 for row in result.rows)


@pytest.mark.gpu
def test_cudnn_is_the_last_row(gpu):
    pytest.importorskip("torch")
    row = run_ladder(SMALL, ["default"], device=gpu, baselines=["cudnn"], seconds=0.01).rows[-1]
    assert (row.name, row.verified) == ("cudnn", True)
    assert row.library.startswith("cuDNN")
