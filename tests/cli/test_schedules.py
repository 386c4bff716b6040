"""`tvmconv schedules W NAME`: what a schedule is and what its knobs take; and which condition a workload lacks."""

import json

import pytest

import tvmconv as tc
from tvmconv import registry

TEXT = "conv2d:1x64x56x56,64x64x3x3,s1,p1"


def test_a_schedule_is_described_with_knobs_options_and_defaults(run):
    status, out, err = run("schedules", TEXT, "direct")
    schedule = registry.find_schedule(tc.parse(TEXT), "direct")
    size = schedule.space(tc.parse(TEXT)).size
    assert (status, err) == (0, "")
    assert out.startswith(f"direct of {TEXT}: {size:,} configs\n\n{schedule.doc}\n\n")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["tile_rc"] == ["tile_rc", "-1,4", "7", "2", "factors", "of", "64,", "outermost", "first"]
    assert rows["pipeline"] == ["pipeline", "none", "5", "none,", "registers,", "async2,", "async3,", "async4"]
    assert "-1 as the first factor stands for the number of tiles that cover the extent" in out


def test_a_schedule_is_described_as_json(run):
    described = json.loads(run("schedules", TEXT, "direct", "--json")[1])
    knobs = {knob["knob"]: knob for knob in described["knobs"]}
    assert knobs["tile_rc"].items() > {"default": [-1, 4], "options": 7, "extent": 64, "parts": 2}.items()
    assert knobs["copy_order"]["values"] == ["contiguous", "coalesced"]
    assert described["configs"] == registry.find_schedule(tc.parse(TEXT), "direct").space(tc.parse(TEXT)).size


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        f"{TEXT},f16,nhwc",
        "conv2d:32x64x56x56,64x64x3x3,s1,p1,f16,nhwc,bias,add",
        "conv2d:1x3x224x224,64x3x7x7,s2,p3,f16,nhwc",
        "conv2d:1x64x56x56,64x1x3x3,s1,p1,g64,f16,nhwc",
        "conv2d:1x64x56x56,64x8x3x3,s1,p1,g8",
        "conv2d:1x64x56x56,64x8x3x3,s1,p1,g8,f16,nhwc",
        "conv3d:1x16x8x16x16,16x16x3x3x3,s1,p1",
        "conv2d_dgrad:2x64x56x56,64x64x3x3,s1,p1,f16,nhwc",
        "conv2d_wgrad:2x64x56x56,64x64x3x3,s1,p1,f16,nhwc",
        "conv2d_transpose:1x64x28x28,64x32x4x4,s2,p1",
        "filter1d:65536,k5",
        "filter2d:512x512x3,5x5",
    ],
)
def test_each_knob_of_a_built_in_schedule_is_described(text):
    workload = tc.parse(text)
    for schedule in tc.schedules(workload):
        assert [knob for knob in schedule.space(workload).knobs if not schedule.describe_knob(knob)] == []


def test_the_meaning_of_a_knob_is_printed(run):
    out = run("schedules", TEXT, "direct")[1]
    assert "  sliced_k: Groups of threads that share the reduction of an output" in out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("schedules", TEXT, "tiling", "more"), "see tvmconv schedules --help"),
        (("run", TEXT, "--foo"), "see tvmconv run --help"),
        (("log", "best", "x", TEXT, "--foo"), "see tvmconv log --help"),
        (("frobnicate",), "see tvmconv --help"),
    ],
)
def test_the_hint_of_a_wrong_command_line_names_the_command(run, words, hint):
    status, _, err = run(*words)
    assert (status, err.strip().endswith(hint)) == (2, True)


def test_a_knob_names_what_it_takes(run):
    for value, accepted in (
        ("tile_c=3", "takes 3 factors of 64 such as -1,4,8 (-1: as many as cover 64), not 3"),
        ("copy_order=x", "takes one of contiguous, coalesced, not x"),
        ("copy_order=coalesce", "not coalesce; the nearest is coalesced"),
        ("tile_cx=1", "no knob 'tile_cx'; the nearest is tile_c, which takes 3 factors of 64"),
        ("pipelin=none", "the nearest is pipeline, which takes one of none, registers, "),
    ):
        schedule = "tiling" if "tile" in value else "direct"
        status, _, err = run("show", TEXT, schedule, "--set", value, "--arch", "sm_90")
        assert (status, accepted in err) == (2, True)


@pytest.mark.parametrize(
    ("text", "schedule", "unmet"),
    [
        (
            "1x64x14x14,64x64x3x3",
            "hopper",
            "in float16, bfloat16, tf32, float8_e4m3fn, float8_e5m2, int8; this workload has float32",
        ),
        (
            "1x64x14x14,64x1x3x3,g64,f16",
            "depthwise_nhwc",
            "in float16 with layout nhwc or a mixed layout; this workload has nchw",
        ),
        ("1x64x14x14,64x64x3x3,s2", "winograd", "in float32 with stride 1; this workload has stride 2x2"),
        ("1x64x14x14,64x32x3x3,g2", "winograd", "in float32 with one group; this workload has 2 groups"),
        ("1x64x14x14,64x64x3x3,f16,nhwc", "stem", "with at most 8 input channels; this workload has 64 input channels"),
        ("1x64x14x14,64x64x3x3", "depthwise", "one input channel; this workload is not of that kind"),
    ],
)
def test_a_schedule_that_does_not_apply_names_the_condition(text, schedule, unmet):
    with pytest.raises(tc.ScheduleError) as caught:
        tc.build(f"conv2d:{text}", schedule, arch="sm_90")
    assert str(caught.value).startswith(f"{schedule} computes conv2d in ")
    assert str(caught.value).endswith(unmet)


def test_a_bare_condition_may_be_without_a_description(schedule_registry):
    def never(s, w, k): ...

    tc.schedule("conv2d", condition=lambda w: False)(never)
    with pytest.raises(tc.ScheduleError, match="for some workloads; this workload does not meet its condition"):
        registry.find_schedule(tc.parse(TEXT), "never")
