"""The model, as a file: trees, configs that serve many workloads, and the fastest configs of those that were measured.

The file is a NumPy archive of plain arrays and one JSON text; nothing in it is executed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import os
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tvmconv import compat, jsonfile
from tvmconv.cost_model.features import DeviceSpec, build_matrix, compute_features
from tvmconv.cost_model.similarity import layer_key
from tvmconv.cost_model.trees import Trees
from tvmconv.errors import Error, FallbackWarning
from tvmconv.files import check_archive, open_regular
from tvmconv.space import Config, Value
from tvmconv.space.search_space import Space
from tvmconv.workloads import Conv, Conv1d, Conv2d, Conv3d, Workload, parse

VERSION = 2
MAX_BYTES = 1 << 28  # of a file, unpacked; the one that comes with the package has 6 MB
PACKAGED_MODEL = Path(__file__).with_name("h200.npz")
_WORKLOAD_PREFIXES = tuple(f"{each.operator}:" for each in (Conv1d, Conv2d, Conv3d))  # how texts of workloads begin
_TREE_ARRAYS = ("feature", "threshold", "left", "roots")


def describe_workload_kind(workload: Conv) -> str:
    """What of a workload decides whether others tell anything of it: its dtype, float16 for bfloat16, and layout."""
    dtype = "float16" if workload.dtype == "bfloat16" else workload.dtype
    return f"{dtype} {workload.layout}"


@dataclass(frozen=True)
class MeasuredExample:
    """A workload that was measured, and a config that was fast on it.

    Attributes:
        workload: its text.
        config: of the schedule.
        relative_throughput: of the speed of the fastest schedule's fastest config on that workload.
    """

    workload: str
    config: Config
    relative_throughput: float


@dataclass(frozen=True)
class ScheduleModel:
    """What is known of one schedule.

    Attributes:
        schedule: its name.
        knobs: names of those that it had, for one workload or another, when the model was trained.
        kinds: the dtypes and layouts of the workloads that were measured: of others nothing is known.
        names: of the features.
        members: forests that were trained on different samples; each tells the base-2 logarithm of how many times as
            long as `DeviceSpec.roofline_seconds` a config takes.
        portfolio: configs of which one or another is fast on most workloads, those that serve most first.
        examples: the fastest configs of what was measured.
    """

    schedule: str
    knobs: tuple[str, ...]
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    members: tuple[Trees, ...]
    portfolio: tuple[Config, ...] = ()
    examples: tuple[MeasuredExample, ...] = ()

    def log2_slowdown(self, workload: Conv, space: Space, points: np.ndarray, device_spec: DeviceSpec) -> np.ndarray:
        """What each member takes configs (n, knobs) to be, as above: float32 (members, n)."""
        inputs = build_matrix(compute_features(workload, space, points, device_spec), self.names, self.knobs)
        return np.stack([member.predict(inputs) for member in self.members])


@dataclass(frozen=True)
class CostModel:
    """All that was learnt of a device.

    Attributes:
        device_spec: the device.
        schedule_models: by schedule, each of workloads of all operators that were measured.
        provenance: of what, when and by which command it was learnt.
        training_layers: the layers that any expert was taught records of, each as `layer_key` has it.
    """

    device_spec: DeviceSpec
    schedule_models: Mapping[str, ScheduleModel]
    provenance: str = ""
    training_layers: frozenset[str] = frozenset()
    _parsed_workloads: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def find_schedule_model(self, workload: Conv, schedule: str, space: Space) -> ScheduleModel | None:
        """Who knows a schedule of a workload; None where nobody does, or the schedule has other knobs by now.

        Epilogues may bring knobs of their own, which nobody has learnt anything of; so do axes that images do not have.
        """
        schedule_model = self.schedule_models.get(schedule)
        if schedule_model is None or describe_workload_kind(workload) not in schedule_model.kinds:
            return None
        if not workload.epilogue and isinstance(workload, Conv2d) and not {*space.knobs} <= {*schedule_model.knobs}:
            _warn_once(f"what was learnt of {schedule} is of other knobs, and is not used: train it anew")
            return None
        return schedule_model

    def count_training_layers(self, layers: Collection[Workload]) -> int:
        """Of how many of some layers it was taught records, in whatever batch, dtype, layout and epilogue."""
        return sum(layer_key(layer) in self.training_layers for layer in layers)

    def parse_workload(self, text: str) -> Any:
        """The workload of a text of an example, parsed once."""
        if text not in self._parsed_workloads:
            self._parsed_workloads[text] = parse(text)
        return self._parsed_workloads[text]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file."""
        arrays: dict[str, np.ndarray] = {}
        model_headers = []
        for model_index, schedule_model in enumerate(self.schedule_models.values()):
            members = []
            for member_index, trees in enumerate(schedule_model.members):
                arrays |= {f"{model_index}.{member_index}.{name}": getattr(trees, name) for name in _TREE_ARRAYS}
                members.append({"base": trees.base, "depth": trees.depth})
            field_values = {
                name: getattr(schedule_model, name) for name in ("schedule", "knobs", "kinds", "names", "portfolio")
            }
            examples = [
                [example.workload, example.config, example.relative_throughput] for example in schedule_model.examples
            ]
            model_headers.append({**field_values, "members": members, "examples": examples})
        file_header = {"version": VERSION, "machine": asdict(self.device_spec), "provenance": self.provenance}
        header = {**file_header, "taught": sorted(self.training_layers), "experts": model_headers}
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with open(path, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, head=text, **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Read a file.

        Raises:
            Error: it cannot be read, or is no such file, or of another version.
        """
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
        except Exception as error:  # for a file that is damaged, archives, decompression and NumPy raise a dozen kinds
            raise Error(f"cannot read {path}: {type(error).__name__}: {error}") from error
        if cost_model is None:
            raise Error(f"{path} is of version {version}, and this library reads {VERSION}: train it anew")
        return cost_model


def _parse_cost_model(header: Mapping[str, Any], arrays: Mapping[str, Any]) -> CostModel:
    device_spec = DeviceSpec(**header["machine"])
    if not all(
        1 <= float(value) < math.inf
        for value in (device_spec.multiprocessors, device_spec.flops, device_spec.bandwidth)
    ):
        raise ValueError(f"there is no such machine: {device_spec}")
    schedule_models = [
        _parse_schedule_model(model_index, data, arrays) for model_index, data in enumerate(header["experts"])
    ]
    training_layers = frozenset(map(str, header["taught"]))
    return CostModel(
        device_spec, {value.schedule: value for value in schedule_models}, str(header["provenance"]), training_layers
    )


def _parse_schedule_model(model_index: int, data: Mapping[str, Any], arrays: Mapping[str, Any]) -> ScheduleModel:
    members = tuple(
        Trees(**{name: arrays[f"{model_index}.{member_index}.{name}"] for name in _TREE_ARRAYS}, **member_data)
        for member_index, member_data in enumerate(data["members"])
    )
    schedule = str(data["schedule"])
    examples = tuple(
        MeasuredExample(text, compat.rename_config(schedule, _parse_config(config)), relative_throughput)
        for text, config, relative_throughput in data["examples"]
    )
    if not (
        members
        and data["names"]
        and all(member_data.workload.startswith(_WORKLOAD_PREFIXES) for member_data in examples)
    ):
        raise ValueError("an expert without forests or features, or with workloads that are no convolutions")
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
    """A config as JSON has it, whose tuples are lists there."""
    return {
        name: tuple(map(_parse_integer, value)) if isinstance(value, list) else _parse_scalar(value)
        for name, value in data.items()
    }


def _parse_scalar(value: Any) -> Value:
    return value if isinstance(value, (bool, float, str)) else _parse_integer(value)


def _parse_integer(value: Any) -> int:
    """One that NumPy has room for; raises TypeError or OverflowError for anything else."""
    return int(np.int64(operator.index(value)))


class _ActiveModel:
    """The model that predictions are made by; one for all threads of this process."""

    def __init__(self) -> None:
        self.is_set = False
        self.cost_model: CostModel | None = None


_active_model = _ActiveModel()


def set_cost_model(cost_model: CostModel | str | os.PathLike[str] | None) -> None:
    """Have predictions made by a model, in place of the one that comes with the package.

    Args:
        cost_model: the model, or its file; None for no predictions at all.

    Raises:
        Error: the file cannot be read.
    """
    selected = cost_model if isinstance(cost_model, CostModel) or cost_model is None else CostModel.load(cost_model)
    _active_model.is_set, _active_model.cost_model = True, selected


@contextlib.contextmanager
def disable_cost_model() -> Iterator[None]:
    """Within the block, nothing is predicted."""
    previous = _active_model.is_set, _active_model.cost_model
    set_cost_model(None)
    try:
        yield
    finally:
        _active_model.is_set, _active_model.cost_model = previous


def cost_model_for(arch: str | None) -> CostModel | None:
    """The model of GPUs of an architecture such as "sm_90"; None if nothing is known of these."""
    if not _active_model.is_set:
        _active_model.is_set, _active_model.cost_model = True, _load_packaged_model()
    cost_model = _active_model.cost_model
    return cost_model if cost_model and arch and cost_model.device_spec.arch == arch else None


def _load_packaged_model() -> CostModel | None:
    """The model that comes with the package; None, and a warning, where it cannot be used."""
    if not PACKAGED_MODEL.exists():
        return None
    try:
        return CostModel.load(PACKAGED_MODEL)
    except Error as error:
        _warn_once(f"what was learnt is not used: {error}")
        return None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, FallbackWarning, stacklevel=3)
