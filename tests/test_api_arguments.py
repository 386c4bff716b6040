"""The public functions take texts of workloads, and refuse everything else that is wrong in one line."""

import pytest

import tvmconv as tc

TEXT = "conv2d:1x4x6x6,4x4x3x3,s1,p1"
W = tc.parse(TEXT)


def test_texts_of_workloads_are_taken(instant, log):
    assert tc.build(TEXT, "tiling", arch="sm_90").workload == W
    assert tc.build(TEXT, "tiling", device="opencl:0", log=[]).workload == W
    assert tc.schedules(TEXT) == tc.schedules(W)
    tuned = tc.tune(TEXT, "tiling", trials=1, log=log, device="opencl:0")
    assert tuned.final.workload == W


@pytest.mark.parametrize("wrong", [5, b"x", [1]])
@pytest.mark.parametrize(
    "call",
    [
        tc.parse,
        tc.suite,
        tc.Record.parse,
        tc.schedules,
        tc.tune,
        lambda wrong: tc.build(wrong, arch="sm_90"),
        lambda wrong: tc.build(W, wrong, arch="sm_90"),
        lambda wrong: tc.build(W, device=wrong),
        lambda wrong: tc.build(W, arch=wrong),
        lambda wrong: tc.build(W, "tiling", arch="sm_90", config=wrong),
        lambda wrong: tc.build(W, "tiling", arch="sm_90", config={"tile_c": wrong}),
        lambda wrong: tc.build(W, "tiling", arch="sm_90", log=wrong),
        lambda wrong: tc.tune(W, wrong),
        lambda wrong: tc.tune(W, log=wrong, device="opencl:0"),
        lambda wrong: tc.tune(W, device=wrong),
    ],
)
def test_what_is_of_another_type_is_refused_in_one_line(call, wrong):
    with pytest.raises(tc.Error) as caught:
        call(wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [None, 5])
def test_what_is_no_text_is_no_workload(wrong):
    with pytest.raises(tc.WorkloadError, match=r"^expected the text of a workload, as in conv2d:"):
        tc.parse(wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("trials", value) for value in ("3", 10**400, 2.5, True, 0)),
        *(("seconds", value) for value in ("3", float("nan"), 0)),
        *(("patience", "3"), ("patience", 0), ("workers", 1.5), ("workers", 0), ("seed", -1), ("transfer_logs", 5)),
    ],
)
def test_a_search_refuses_what_is_no_number(name, value):
    with pytest.raises(tc.TuningError, match=f"^{name} has to be ") as caught:
        tc.tune(W, "tiling", device="opencl:0", **{name: value})
    assert len(str(caught.value)) < 160


def test_kernels_take_nested_lists(opencl):
    kernel = tc.build(W, "default", device=opencl)
    x, k = W.inputs(seed=0)
    assert (kernel(x.tolist(), k) == kernel(x, k)).all()


@pytest.mark.parametrize("wrong", [[[1], [1, 2]], "abc", None])
def test_kernels_refuse_what_is_no_array_of_numbers(opencl, wrong):
    with pytest.raises(tc.WorkloadError, match=r"^expected an array of numbers"):
        tc.build(W, "default", device=opencl)(wrong, W.inputs(seed=0)[1])


def test_results_print_as_one_line(instant, log):
    tuned = tc.tune(W, "tiling", trials=3, log=log, device="opencl:0")
    for printed in (str(tuned), repr(tuned), str(tuned.status), str(tuned.final)):
        assert "\n" not in printed
        assert len(printed) < 300
    assert str(tuned).startswith(f"<TuneResult {W} by tiling: ")
    assert "<SearchProgress 3 of 3 configs in " in str(tuned)
