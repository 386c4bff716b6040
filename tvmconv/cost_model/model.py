"""The cost model and its file: trees, configs that are often fast, and the fastest configs of measured workloads.

The file is a NumPy archive of plain arrays and one JSON text. No part of it is executed.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import warnings
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tvmconv import compat, jsonfile
from tvmconv.cost_model.features import build_matrix, compute_features
from tvmconv.cost_model.similarity import layer_key
from tvmconv.cost_model.trees import Trees
from tvmconv.errors import Error, FallbackWarning
from tvmconv.files import check_archive, open_regular
from tvmconv.space import Config, Value
from tvmconv.space.search_space import Space
from tvmconv.target import Target
from tvmconv.workloads import Conv2d, Workload, operators, parse
from tvmconv.workloads.conv_operator import ConvOperator

VERSION = 2
MAX_BYTES = 1 << 28  # maximum size of a decompressed file; the file of the package has 6 MB
PACKAGED_MODEL = Path(__file__).with_name("h200.npz")
_MAX_INT64 = (1 << 63) - 1
_HEADER_FIELDS = ("schedule", "knobs", "kinds", "names", "portfolio")
_TREE_ARRAYS = ("feature", "threshold", "left", "roots")


def describe_workload_kind(workload: ConvOperator) -> str:
    """Return the dtype, with float16 for bfloat16, and the layout of a workload; predictions need samples of both.

    They are preceded by the kind of a gradient or a transposed convolution, such as `dgrad`.
    """
    dtype = "float16" if workload.dtype == "bfloat16" else workload.dtype
    return f"{dtype} {workload.layout}" if workload.kind == "conv" else f"{workload.kind} {dtype} {workload.layout}"


@dataclass(frozen=True)
class MeasuredExample:
    """A measured workload, and a fast config for it."""

    workload: str
    config: Config  # config of the schedule
    relative_throughput: float  # throughput relative to the fastest config of any schedule for this workload


@dataclass(frozen=True)
class ScheduleModel:
    """The cost model of one schedule."""

    schedule: str
    # Names of all knobs of the schedule when the model was trained, and of features that some of its operators lack.
    knobs: tuple[str, ...]
    # Dtypes and layouts of the training set, as `describe_workload_kind` returns them. The model does not cover other
    # workloads.
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    # Forests that were trained on different samples. They predict the slowdown, the base-2 logarithm of the time
    # divided by `DeviceSpec.roofline_seconds`.
    members: tuple[Trees, ...]
    portfolio: tuple[Config, ...] = ()  # configs of which at least one is fast on most workloads, the most useful first
    examples: tuple[MeasuredExample, ...] = ()  # fastest configs of the measured workloads

    def view(self, workload: ConvOperator) -> ConvOperator | None:
        """Return the workload as the model covers it; None if it does not. A schedule that was measured only channels
        last converts channels-first arrays.
        """
        if describe_workload_kind(workload) in self.kinds:
            return workload
        channels_last = workload.to_channels_last()
        return channels_last if describe_workload_kind(channels_last) in self.kinds else None

    def log2_slowdown(
        self, workload: ConvOperator, space: Space, points: np.ndarray, device_spec: Target
    ) -> np.ndarray:
        """Return the slowdowns that each member predicts for points (n, knobs): float32 (members, n)."""
        inputs = build_matrix(compute_features(workload, space, points, device_spec), self.names, self.knobs)
        return np.stack([member.predict(inputs) for member in self.members])


@dataclass(frozen=True)
class CostModel:
    """The cost model of one device."""

    device_spec: Target
    schedule_models: Mapping[str, ScheduleModel]  # cost models by schedule, each for all operators
    provenance: str = ""  # training data, date and command of the training
    training_layers: frozenset[str] = frozenset()  # layers of the training set, as `layer_key` returns them
    _parsed_workloads: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def find_schedule_model(self, workload: ConvOperator, schedule: str, space: Space) -> ScheduleModel | None:
        """Return the cost model of a schedule for a workload; None if there is none, or the knobs have changed. Knobs
        of epilogues, and of spatial dimensions other than those of images, need not be known.
        """
        schedule_model = self.schedule_models.get(schedule)
        if schedule_model is None or schedule_model.view(workload) is None:
            return None
        other_knobs = {*space.knobs} - {*schedule_model.knobs} - compat.ADDED_KNOBS.get(schedule, frozenset())
        if not workload.epilogue and isinstance(workload, Conv2d) and other_knobs:
            _warn_once(f"the cost model of {schedule} has other knobs and is not used: train it again")
            return None
        return schedule_model

    def count_training_layers(self, layers: Collection[Workload]) -> int:
        """Return how many of some layers are in the training set, in any batch size, dtype, layout and epilogue."""
        return sum(layer_key(layer) in self.training_layers for layer in layers)

    def parse_workload(self, text: str) -> Any:
        """Return the workload of an example's text, which is parsed only once."""
        if text not in self._parsed_workloads:
            self._parsed_workloads[text] = parse(text)
        return self._parsed_workloads[text]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cost model to a file (.npz)."""
        arrays: dict[str, np.ndarray] = {}
        model_headers = []
        for model_index, schedule_model in enumerate(self.schedule_models.values()):
            members = []
            for member_index, trees in enumerate(schedule_model.members):
                arrays |= {f"{model_index}.{member_index}.{name}": getattr(trees, name) for name in _TREE_ARRAYS}
                members.append({"base": trees.base, "depth": trees.depth})
            header = {name: getattr(schedule_model, name) for name in _HEADER_FIELDS}
            examples = [[each.workload, each.config, each.relative_throughput] for each in schedule_model.examples]
            model_headers.append({**header, "members": members, "examples": examples})
        file_header = {"version": VERSION, "machine": self.device_spec.to_json(), "provenance": self.provenance}
        header = {**file_header, "taught": sorted(self.training_layers), "experts": model_headers}
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with open(path, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, head=text, **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Read a cost model from a file."""
        try:
            with open_regular(path) as file:
                with zipfile.ZipFile(file) as packed:
                    check_archive(packed, MAX_BYTES)
                file.seek(0)
                with np.load(file, allow_pickle=False) as archive:
                    arrays: dict[str, Any] = dict(archive)
            header = jsonfile.parse_json(arrays["head"].tobytes()).value
            version = header["version"]
            cost_model = _parse_cost_model(header, arrays) if version == VERSION else None
        except Exception as error:  # zipfile, zlib and NumPy raise many kinds of errors for damaged files
            raise Error(f"cannot read {path}: {type(error).__name__}: {error}") from error
        if cost_model is None:
            raise Error(f"{path} has version {version}, but expected is version {VERSION}: train it again")
        return cost_model


def _parse_cost_model(header: Mapping[str, Any], arrays: Mapping[str, Any]) -> CostModel:
    device_spec = Target(**header["machine"])
    rates = (device_spec.multiprocessors, device_spec.flops, device_spec.bandwidth)
    if not all(1 <= float(rate) < math.inf for rate in rates):
        raise ValueError(f"expected positive finite rates of the device, not {device_spec}")
    models = [_parse_schedule_model(index, data, arrays) for index, data in enumerate(header["experts"])]
    models_by_schedule = {each.schedule: each for each in models}
    return CostModel(device_spec, models_by_schedule, str(header["provenance"]), frozenset(map(str, header["taught"])))


def _parse_schedule_model(model_index: int, data: Mapping[str, Any], arrays: Mapping[str, Any]) -> ScheduleModel:
    members = tuple(
        Trees(**{name: arrays[f"{model_index}.{member_index}.{name}"] for name in _TREE_ARRAYS}, **member_data)
        for member_index, member_data in enumerate(data["members"])
    )
    schedule = str(data["schedule"])
    examples = tuple(
        MeasuredExample(text, compat.rename_config(schedule, _parse_config(config)), throughput)
        for text, config, throughput in data["examples"]
    )
    prefixes = tuple(f"{name}:" for name, each in operators().items() if issubclass(each, ConvOperator))
    is_convolution = all(example.workload.startswith(prefixes) for example in examples)
    if not (members and data["names"] and is_convolution):
        raise ValueError("expected a model of a schedule with forests and features, and examples of convolutions")
    for trees in members:
        trees.check(len(data["names"]))
    return ScheduleModel(
        schedule,
        tuple(compat.rename_knob(schedule, str(name)) for name in data["knobs"]),
        tuple(map(str, data["kinds"])),
        tuple(compat.rename_feature(schedule, str(name)) for name in data["names"]),  # trees go by their positions
        members,
        tuple(compat.rename_config(schedule, _parse_config(config)) for config in data["portfolio"]),
        examples,
    )


def _parse_config(data: Mapping[str, Any]) -> Config:
    """Return a config from JSON, where its tuples are lists; its integers fit in int64."""

    def parse_integer(value: Any) -> int:
        if type(value) is int and abs(value) <= _MAX_INT64:  # nearly all, of tens of thousands
            return value
        return int(np.int64(operator.index(value)))

    def parse_value(value: Any) -> Value:
        if isinstance(value, list):
            return tuple(map(parse_integer, value))
        return value if isinstance(value, (bool, float, str)) else parse_integer(value)

    return {name: parse_value(value) for name, value in data.items()}


_active_models: list[CostModel | None] = []  # the cost model of this process, which all threads share; empty if unset


def set_cost_model(cost_model: CostModel | str | os.PathLike[str] | None) -> None:
    """Set the cost model of this process, or the path of its file, in place of the one that comes with the package."""
    selected = cost_model if isinstance(cost_model, CostModel) or cost_model is None else CostModel.load(cost_model)
    _active_models[:] = [selected]


def cost_model_for(arch: str | None) -> CostModel | None:
    """Return the cost model for an architecture such as "sm_90"; None if the model in use is for another one."""
    if not _active_models:
        set_cost_model(_load_packaged_model())
    cost_model = _active_models[0]
    return cost_model if cost_model and arch and cost_model.device_spec.arch == arch else None


def _load_packaged_model() -> CostModel | None:
    """Return the cost model of the package; None if it is missing, or with a warning if it cannot be read."""
    if not PACKAGED_MODEL.exists():
        return None
    try:
        return CostModel.load(PACKAGED_MODEL)
    except Error as error:
        _warn_once(f"the cost model is not used: {error}")
        return None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, FallbackWarning, stacklevel=3)
