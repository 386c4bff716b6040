import dataclasses
import json
import math

import mapped
import pytest

from tvmconv.compiler.executable import ArrayType, CompiledKernel, Executable, LaunchConfig
from tvmconv.errors import CompileError, DeviceError
from tvmconv.logs.record import ErrorKind
from tvmconv.measure import serialization
from tvmconv.measure.results import RunnerResult

STEP = CompiledKernel(
    code=b"\0\xff code",
    name="main_kernel",
    launch=LaunchConfig((1, 2, 3), (4, 5, 6)),
    arguments=(1, 0),
    shared_bytes=128,
    constants=((1, "K_ptr"),),
    textures=(0,),
)
OTHER = CompiledKernel(
    b"another code", "second", LaunchConfig((7, 1, 1), (8, 1, 1)), (2, 0), 0, dynamic_shared_bytes=1 << 16
)
ARRAYS = (ArrayType((1, 2), "float32"), ArrayType((3,), "bfloat16"))
PROGRAM = Executable((STEP,), ARRAYS)
MAPPED = CompiledKernel(
    b"code",
    "mapped",
    LaunchConfig((1, 1, 1), (128, 1, 1)),
    (1, 0, 2),
    0,
    tensor_maps=((0, mapped.WEIGHT), (1, mapped.IMAGE)),
    uses_pdl=True,
)
MAPPED_PROGRAM = Executable((MAPPED,), ARRAYS, (ArrayType((5,), "float32"),))
SEVERAL = Executable((STEP, OTHER, dataclasses.replace(STEP, name="third")), ARRAYS, (ArrayType((5, 7), "float16"),))


@pytest.mark.parametrize("best", [1.5e-6, math.inf])
@pytest.mark.parametrize(
    "program", [PROGRAM, SEVERAL, dataclasses.replace(SEVERAL, num_prepack_kernels=2), MAPPED_PROGRAM]
)
def test_a_program_arrives_as_it_was_sent(program, best):
    assert serialization.decode_executable(*serialization.encode_executable(program, best)) == (program, best)


@pytest.mark.parametrize("change", [lambda code: code[:-1], lambda code: code + b"x"])
def test_code_of_another_length_than_was_sent_is_refused(change):
    header, code = serialization.encode_executable(SEVERAL, math.inf)
    with pytest.raises(DeviceError, match=f"bytes of code: expected {len(code)}"):
        serialization.decode_executable(header, change(code))


@pytest.mark.parametrize(
    ("position", "change", "error", "message"),
    [
        (0, {"box": [64, 1, 999]}, CompileError, "expected a copy of at most 256·256·256 elements"),
        (0, {"extents": "__import__('os')"}, CompileError, "expected a tensor map"),
        (3, {}, DeviceError, "is at position 3, but mapped has"),
        (-1, {}, DeviceError, "is at position -1, but mapped has"),
    ],
)
def test_a_tensor_map_that_no_launch_could_take_is_refused(position, change, error, message):
    header, code = serialization.encode_executable(MAPPED_PROGRAM, math.inf)
    told = json.loads(header)
    told["kernels"][0]["tensor_maps"] = [[position, {**mapped.WEIGHT.to_dict(), **change}]]
    with pytest.raises(error, match=message):
        serialization.decode_executable(json.dumps(told), code)


@pytest.mark.parametrize(
    "outcome",
    [
        RunnerResult((1e-6, 2e-6), 3e-7, phases={"load": 1.5}, seconds=0.25),
        RunnerResult(error=ErrorKind.RUN_TIMEOUT, message="the kernel runs longer than 10 s"),
    ],
)
def test_an_outcome_arrives_as_it_was_sent(outcome):
    assert serialization.decode_result(serialization.encode_result(outcome)) == outcome


@pytest.mark.parametrize(
    "change",
    [
        {"times": [0.0]},
        {"times": []},
        {"times": None},
        {"more": 1},
        {"relative_error": -1},
        {"seconds": -1},
        {"error": 99},
    ],
)
def test_an_outcome_that_no_measurement_has_is_refused(change):
    told = {**json.loads(serialization.encode_result(RunnerResult((1e-6,)))), **change}
    with pytest.raises(DeviceError, match="the worker's answer"):
        serialization.decode_result(json.dumps(told))


def test_an_order_arrives_as_it_was_sent():
    order = serialization.SessionRequest("conv2d:1x4x6x6,8x4x3x3,s1,p1", 7, 2.5, 1 << 30, "full")
    assert serialization.SessionRequest.decode(order.encode()) == order


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{", '{"times": ' + "9" * 5000 + "}"])
@pytest.mark.parametrize(
    "decode",
    [
        serialization.decode_result,
        serialization.SessionRequest.decode,
        lambda text: serialization.decode_executable(text, b""),
    ],
    ids=["outcome", "order", "program"],
)
def test_message_that_is_none_is_one_line(decode, text):
    with pytest.raises(DeviceError, match=r"not an? [\w ]+ of tvmconv") as caught:
        decode(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "change", [{"seed": -1}, {"timeout_seconds": 0}, {"timeout_seconds": 1e308}, {"memory_limit_bytes": 0}, {"x": 1}]
)
def test_order_that_no_search_gives_is_refused(change):
    order = serialization.SessionRequest("conv2d:1x4x6x6,8x4x3x3,s1,p1", 7, 2.5, 1 << 30)
    told = {**dataclasses.asdict(order), **change}
    with pytest.raises(DeviceError, match=f"is not a session request of tvmconv .*{next(iter(change))}"):
        serialization.SessionRequest.decode(json.dumps(told))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("codes", 0), -1),
        (("kernels",), []),
        (("kernels", 0, "grid", 0), 0),
        (("kernels", 0, "block", 1), 10**400),
        (("kernels", 0, "arguments", 0), 3),
        (("kernels", 0, "arguments", 0), -1),
        (("kernels", 0, "code"), 2),
        (("kernels", 0, "shared_bytes"), -1),
        (("kernels", 0, "constants"), [[2, "K"]]),
        (("kernels", 0, "textures"), [2]),
        (("arrays", 0, 0), [0]),
        (("arrays", 0, 0), [1 << 31, 1 << 31]),
        (("arrays", 0, 1), "object"),
        (("num_prepack_kernels",), 4),
        (("best",), -1),
    ],
)
def test_program_with_a_number_out_of_range_is_refused(path, value):
    header, code = serialization.encode_executable(SEVERAL, 1e-6)
    told = json.loads(header)
    inside = told
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises(DeviceError, match=f"are not an executable of tvmconv \\({path[0]}"):
        serialization.decode_executable(json.dumps(told), code)


def test_code_that_steps_share_is_sent_once():
    _, code = serialization.encode_executable(SEVERAL, math.inf)
    assert len(code) == len(STEP.code) + len(OTHER.code)


def test_a_deviation_that_json_cannot_hold_is_left_out():
    outcome = RunnerResult(relative_error=math.nan, error=ErrorKind.WRONG_ANSWER)
    assert serialization.decode_result(serialization.encode_result(outcome)).relative_error is None
