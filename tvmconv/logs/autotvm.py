"""The translation between AutoTVM's log format and tvmconv: tasks and their arguments, knobs, targets.

A task is the name of a template and its arguments. Three of AutoTVM's templates correspond to a schedule with the same
knobs, so that AutoTVM can read these lines of tvmconv and vice versa. Every other schedule has a task of its own, whose
only argument is the workload's text.

Source: TVM 0.7 to 0.19, `python/tvm/autotvm/record.py`, `task/space.py` (`ConfigEntity.to_json_dict`) and
`topi/cuda/conv2d.py`, `depthwise_conv2d.py`, `conv2d_winograd.py`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tvmconv.errors import RecordError, WorkloadError
from tvmconv.logs import json_checks
from tvmconv.space import Config, Value
from tvmconv.workloads import Conv2d, Workload, parse
from tvmconv.workloads.layout import CHANNELS_FIRST
from tvmconv.workloads.text import quote

DIRECT, DEPTHWISE, WINOGRAD = "conv2d_nchw.cuda", "depthwise_conv2d_nchw.cuda", "conv2d_nchw_winograd.cuda"
WINOGRAD_OF_TRANSFORMED = "conv2d_nchw_winograd_without_weight_transform.cuda"  # its weight is (α, α, C, O)
_SCHEDULE_BY_TASK = {
    DIRECT: "direct",
    DEPTHWISE: "depthwise",
    WINOGRAD: "winograd",
    WINOGRAD_OF_TRANSFORMED: "winograd",
}
_TASK_PREFIX = "tvmconv"  # the tasks of tvmconv are named tvmconv.OPERATOR.SCHEDULE
_SPLIT_KIND, _CHOICE_KIND = "sp", "ot"  # the kinds of knobs in AutoTVM's GPU templates


def encode_task(workload: Workload, schedule: str) -> tuple[str, list[Any]]:
    """Return the name of the task and its arguments, as JSON values."""
    if isinstance(workload, Conv2d) and _is_autotvm_compatible(workload):
        w = workload
        options = [list(w.stride), list(w.padding), list(w.dilation), w.dtype]
        if schedule in ("direct", "winograd") and w.groups == 1:
            return DIRECT if schedule == "direct" else WINOGRAD, [
                _encode_tensor(w.input_shape, w.dtype),
                _encode_tensor(w.weight_shape, w.dtype),
                *options,
            ]
        if schedule == "depthwise" and w.groups == w.C:
            weight = (w.C, w.O // w.C, w.R, w.S)
            return DEPTHWISE, [_encode_tensor(w.input_shape, w.dtype), _encode_tensor(weight, w.dtype), *options]
    return f"{_TASK_PREFIX}.{workload.operator}.{schedule}", [workload.text]


def _is_autotvm_compatible(workload: Conv2d) -> bool:
    """Return whether AutoTVM's NCHW templates can compute a workload."""
    has_plain_arrays = workload.layout == CHANNELS_FIRST and workload.dtype == workload.storage
    return has_plain_arrays and not workload.epilogue and not workload.required_features


def decode_task(task: str, args: Sequence[Any]) -> tuple[Workload, str]:
    """Return the workload and the name of the schedule of a task.

    `args`: arguments. For AutoTVM's convolutions, these are two tensors, stride, padding and optionally dilation and
        output dtype.
    """
    if task in _SCHEDULE_BY_TASK:
        return _decode_convolution(task, args), _SCHEDULE_BY_TASK[task]
    if task.startswith(f"{_TASK_PREFIX}.") and task.count(".") == 2 and len(args) == 1:
        return parse_workload(json_checks.check_text(args[0], "the task's argument")), task.rpartition(".")[2]
    raise RecordError(f"there is no schedule for task {quote(task)}: expected one of {', '.join(_SCHEDULE_BY_TASK)}")


def _encode_tensor(shape: Sequence[int], dtype: str) -> list[Any]:
    return ["TENSOR", list(shape), dtype]


def _decode_convolution(task: str, args: Sequence[Any]) -> Conv2d:
    if not 4 <= len(args) <= 6:
        raise RecordError(f"task {task} takes 4 to 6 arguments", f"there are {len(args)}")
    (N, C, H, W), dtype = _decode_tensor(args[0], "the input")
    weight, weight_dtype = _decode_tensor(args[1], "the weight")
    options, out_dtype = list(args[2:]), dtype
    if len(args) == 6 or isinstance(options[-1], str):
        out_dtype = json_checks.check_text(options.pop(), "the output's dtype")
    if not dtype == weight_dtype == out_dtype:
        dtypes = ", ".join(map(quote, (dtype, weight_dtype, out_dtype)))
        raise RecordError("input, weight and output differ in their dtypes", dtypes)
    O, channels_per_group, R, S = weight  # noqa: E741
    groups = 1
    if task == WINOGRAD_OF_TRANSFORMED:
        alpha, _, channels_per_group, O = weight  # noqa: E741
        R = S = _infer_filter_size(alpha, H)
    if task == DEPTHWISE:  # its weight is (C, multiplier, R, S)
        O, channels_per_group, groups = O * channels_per_group, O, C  # noqa: E741
    if channels_per_group != C:
        raise RecordError("the weight does not fit the input", f"{weight} and {C} channels in task {task}")
    names = ("stride", "padding", "dilation")[: len(options)]
    geometry: dict[str, Any] = {name: _decode_integers(value, name) for name, value in zip(names, options, strict=True)}
    try:
        return Conv2d(N, C, H, W, O, R, S, **geometry, groups=groups, dtype=dtype)
    except WorkloadError as error:
        raise RecordError(f"the arguments of task {task} are not a valid workload", str(error)) from error


def _infer_filter_size(alpha: int, height: int) -> int:
    """Return the size of a filter that was transformed to α; AutoTVM chose its tile size by the image's height."""
    return alpha + 1 - (4 if height % 8 == 0 else 2)


def _decode_tensor(value: object, name: str) -> tuple[list[int], str]:
    tensor_tag, shape, dtype = json_checks.check_list(value, name, 3)
    if tensor_tag != "TENSOR":
        raise RecordError(f"{name} is not a tensor", json_checks.abbreviate(tensor_tag))
    shape_name = f"the shape of {name}"
    sizes = [json_checks.check_integer(size, shape_name) for size in json_checks.check_list(shape, shape_name, 4)]
    return sizes, json_checks.check_text(dtype, f"the dtype of {name}")


def _decode_integers(value: object, name: str) -> tuple[int, ...]:
    """Return the value of one integer or of a list of integers; the workload checks their number."""
    return tuple(json_checks.check_integer(number, name) for number in (value if isinstance(value, list) else [value]))


@functools.lru_cache(maxsize=4096)
def parse_workload(text: str) -> Workload:
    """Parse the text of a workload; raise RecordError if it is malformed."""
    try:
        return parse(text)
    except WorkloadError as error:
        raise RecordError("the workload's text does not parse", str(error)) from error


def encode_config(config: Mapping[str, Value]) -> list[Any]:
    """Return AutoTVM's entities: `[name, "sp", factors]` for a split, and `[name, "ot", value]` for a choice."""
    return [
        [name, _SPLIT_KIND, list(value)] if isinstance(value, (tuple, list)) else [name, _CHOICE_KIND, value]
        for name, value in config.items()
    ]


def decode_config(entities: object) -> Config:
    """Return the config of AutoTVM's entities, with the recorded values."""
    config: Config = {}
    for entity in json_checks.check_list(entities, "the config's entity"):
        name, kind, value = json_checks.check_list(entity, "a knob", 3)
        if json_checks.check_line(name, "a knob's name") in config:
            raise RecordError("the config has a knob twice", quote(name))
        if kind == _SPLIT_KIND:
            factors = json_checks.check_list(value, "the value of a split")
            config[name] = _decode_split(factors)
        elif kind == _CHOICE_KIND and isinstance(value, (bool, int, float, str)):
            config[name] = _decode_choice(value)
        else:
            raise RecordError("a knob is neither a split nor a choice", json_checks.abbreviate(entity))
    return config


def _decode_split(factors: Sequence[object]) -> tuple[int, ...]:
    """Return the factors of a split, whose product has at most `json_checks.MAX_BITS` bits."""
    integers = tuple(json_checks.check_integer(factor, "a split's factor") for factor in factors)
    if not abs(math.prod(map(float, integers))) < 2.0**json_checks.MAX_BITS:
        reason = f"the product of a split's factors has more than {json_checks.MAX_BITS} bits"
        raise RecordError(reason, json_checks.abbreviate(factors))
    return integers


def _decode_choice(value: bool | int | float | str) -> Value:
    if isinstance(value, str):
        return json_checks.check_line(value, "a choice")
    if isinstance(value, float):
        return json_checks.check_number(value, "a choice")
    return value if isinstance(value, bool) else json_checks.check_integer(value, "a choice")


def parse_model_name(target: str) -> str:
    """Return the device that a target names by `-model=`, as in `cuda -model=v100`; `unknown` if there is none."""
    match = re.search(r"(?:^|\s)-model=(\S+)", target)
    return match[1] if match else "unknown"
