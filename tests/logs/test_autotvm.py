"""AutoTVM's lines become records of our schedules with the very values that they recorded, or are refused by name."""

import json
from pathlib import Path

import pytest

import tvmconv as tc
from tvmconv.logs.record import ErrorKind, Record

SAMPLE = Path(__file__).parents[1] / "data/tophub-cuda.jsonl"
LINES = [line for line in SAMPLE.read_text().splitlines() if not line.startswith("#")]
DIRECT = LINES[0]
DEPTHWISE = next(line for line in LINES if "depthwise" in line)
WINOGRAD = next(line for line in LINES if "winograd" in line)
SUPPORTED = [line for line in LINES if "transpose_nchw" not in line and "batch_matmul" not in line]


def edited(line, args=None, **keys):
    """A line with other top-level keys, or other arguments of its task."""
    row = json.loads(line) | keys
    if args is not None:
        row["input"][2] = args
    return json.dumps(row)


DIRECT_TILES = {"tile_f": (8, 1, 16, 1), "tile_y": (7, 1, 1, 1), "tile_x": (1, 1, 7, 1), "tile_rc": (40, 16)}
DIRECT_CONFIG = {**DIRECT_TILES, "tile_rx": (1, 1), "tile_ry": (1, 1), "auto_unroll_max_step": 0, "unroll_explicit": 0}
WINOGRAD_TILES = {"tile_b": (36, 1, 1, 1), "tile_y": (1, 1, 4, 8), "tile_x": (7, 1, 14, 2), "tile_rc": (8, 16)}
WINOGRAD_CONFIG = {**WINOGRAD_TILES, "auto_unroll_max_step": 128, "unroll_explicit": 1}


@pytest.mark.parametrize(
    ("line", "schedule", "text", "config"),
    [
        (DIRECT, "direct", "conv2d:1x640x7x7,128x640x1x1", DIRECT_CONFIG),
        (DEPTHWISE, "depthwise", "conv2d:1x256x28x28,256x1x3x3,s2,p1,g256", None),
        (WINOGRAD, "winograd", "conv2d:1x128x56x56,32x128x3x3,p1", WINOGRAD_CONFIG),
    ],
)
def test_a_line_is_a_record_of_the_same_schedule(line, schedule, text, config):
    record = Record.parse(line)
    assert (record.schedule, record.workload) == (schedule, tc.parse(text))
    if config:
        assert list(record.config.items()) == list(config.items())
    if line is DIRECT:
        assert (record.device, record.target) == ("titanx", "cuda -model=titanx")
        assert record.times == (2.506711887295765e-05,)


@pytest.mark.parametrize("line", SUPPORTED)
def test_autotvm_reads_in_our_line_what_it_wrote(line):
    old, new = json.loads(line), json.loads(Record.parse(line).line())
    assert {key: new[key] for key in old} == old


@pytest.mark.parametrize(
    ("padding", "text"),
    [([1, 2, 1, 2], "p1x2"), ([1, 2], "p1x2"), ([2, 2], "p2"), ([1], "p1"), (1, "p1"), ([1, 0, 2, 3], "p1x0x2x3")],
)
def test_padding_may_be_given_in_every_old_form(padding, text):
    args = json.loads(DIRECT)["input"][2]
    args[3] = padding
    assert Record.parse(edited(DIRECT, args)).workload == tc.parse(f"conv2d:1x640x7x7,128x640x1x1,{text}")


@pytest.mark.parametrize("rest", [[], ["float32"], [[2, 2]], [2], [[2, 2], "float32"], [2, "float32"]])
def test_dilation_and_output_dtype_may_be_missing(rest):
    args = json.loads(DIRECT)["input"][2][:4]
    dilation = ",d2" if len(rest) and rest[0] != "float32" else ""
    assert Record.parse(edited(DIRECT, [*args, *rest])).workload == tc.parse(f"conv2d:1x640x7x7,128x640x1x1{dilation}")


@pytest.mark.parametrize("costs", [[1e9], [1e10, 1e10], [], ["RuntimeError:\n  too many threads"]])
def test_an_error_of_autotvm_is_an_error_without_times(costs):
    record = Record.parse(edited(DIRECT, result=[costs, 4, 0.5, 1.5e9]))
    assert (record.error, record.times) == (ErrorKind.RUNTIME, ())
    assert record.message == ("RuntimeError: too many threads" if costs[:1] and isinstance(costs[0], str) else "")


def test_a_target_without_a_model_is_of_an_unknown_device():
    row = json.loads(DIRECT)
    row["input"][0] = "cuda -keys=cuda,gpu"
    assert Record.parse(json.dumps(row)).device == "unknown"


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("conv2d:1x4x6x6,8x2x3x3,s1,p0,g2", "direct"),
        ("conv2d:1x4x6x6,8x2x3x3,s1,p0,g2", "depthwise"),
        ("conv2d:1x4x6x6,8x2x3x3,s1,p0,g2", "vthread"),
        ("filter1d:100,k5", "basic"),
        ("filter2d:7x11x3,3x5,clamp", "register"),
    ],
)
def test_what_autotvm_had_no_template_for_is_a_task_of_our_own(text, schedule):
    record = Record(tc.parse(text), schedule, {}, "cpu", "opencl", times=(1.0,))
    assert json.loads(record.line())["input"][1:3] == [f"tvmconv.{text.partition(':')[0]}.{schedule}", [text]]
    assert Record.parse(record.line()) == record


def with_task(name):
    return DIRECT.replace("conv2d_nchw.cuda", name)


REFUSALS = {
    "another operator": (with_task("dense.cuda"), "no schedule for task 'dense.cuda'"),
    "another target's template": (with_task("conv2d_nchw_spatial_pack.mali"), "'conv2d_nchw_spatial_pack.mali'"),
    "another dtype": (DIRECT.replace("float32", "float64"), "dtype='float64'"),
    "dtypes that differ": (DIRECT.replace('"float32"], {}', '"float16"], {}'), "differ in their dtypes"),
    "a weight of other channels": (DIRECT.replace("640, 1, 1", "639, 1, 1"), "does not fit the input"),
    "padding by name": (DIRECT.replace("[0, 0, 0, 0]", '"SAME"'), "padding is not an integer: 'SAME'"),
    "log format 0.1": ('{"i": [], "r": [], "v": 0.1}', "log format 0.1: expected 0.2"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_there_is_no_schedule_for_is_refused_by_name(name):
    line, message = REFUSALS[name]
    with pytest.raises(tc.RecordError) as refused:
        Record.parse(line)
    assert message in str(refused.value)
