"""Recorded spaces: every config was measured once and for all, so that a tuner can be tried without a device.

The files are those of Kernel Tuner (https://kerneltuner.github.io): its cache, complete or as an interrupted run leaves
it, or a list of results in the T4 format (https://github.com/odgaard/TuningSchema); plain or compressed by gzip. Such
files are published for many kernels and GPUs: https://github.com/AutoTuningAssociation/benchmark_hub.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tvmconv.errors import RecordingError
from tvmconv.files import DamagedError, read_bytes
from tvmconv.jsonfile import shown
from tvmconv.knobs import Choice, Config, Knob, Split, Value
from tvmconv.knobs.space import Space

MAX_NUMBER = 1e15  # of a knob's value
MAX_BYTES = 1 << 29  # of a file, unpacked
LEAST_SECONDS, MOST_SECONDS = 1e-12, 1e9  # that a launch may have taken; what is outside is taken for a failure


@dataclass(frozen=True)
class Recorded:
    """A config and what it cost: a `Trial` that a tuner learns from.

    Attributes:
        config: values by knob name.
        cost: seconds a launch; infinite for a config that failed.
    """

    config: Config
    cost: float


@dataclass(frozen=True, eq=False)
class RecordedSpace(Space):
    """A space whose legal points are those recorded: int32 (n, knobs), ordered by index."""

    points: np.ndarray = field(kw_only=True, repr=False)

    @property
    def listed(self) -> np.ndarray:
        """The recorded points."""
        return self.points

    def legal(self, points: np.ndarray) -> np.ndarray:
        """Which points were recorded: bool (n,)."""
        return np.array([point.tobytes() in self._recorded for point in points.astype(np.int32)], dtype=bool)

    @functools.cached_property
    def _recorded(self) -> set[bytes]:
        return {point.tobytes() for point in self.points}


@dataclass(frozen=True)
class RecordedSplit(Split):
    """A split with the values that were recorded; its extent is that of the largest tile among them.

    Attributes:
        recorded: the values, with -1 in the first place.
    """

    recorded: tuple[tuple[int, ...], ...] = field(kw_only=True, repr=False)

    @property
    def options(self) -> tuple[tuple[int, ...], ...]:
        """The recorded values."""
        return self.recorded

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.recorded)


class Recording:
    """A fully measured space.

    Args:
        trials: what was measured, all with the same knobs; of several for one config, the last counts. Values are
            numbers, words, or the factors of a split.

    Attributes:
        space: the configs that were measured.
        best: the lowest cost of all, in seconds.
    """

    def __init__(self, trials: list[Recorded]):
        knobs = {name: _knob(name, [trial.config[name] for trial in trials]) for name in trials[0].config}
        points = _points(knobs, trials)
        self._costs = {point.tobytes(): trial.cost for point, trial in zip(points, trials, strict=True)}
        self.space = RecordedSpace(knobs, points=np.unique(points, axis=0))
        self.best = min(self._costs.values())

    def measure(self, config: Config) -> Recorded:
        """What was measured of `config`, which has to be legal."""
        return Recorded(config, self._costs[self.space.point(config).tobytes()])

    @property
    def failed(self) -> int:
        """How many configs failed."""
        return sum(math.isinf(cost) for cost in self._costs.values())


def _knob(name: str, values: list[Value]) -> Knob:
    if not isinstance(values[0], tuple):
        options = sorted(set(values))
        return Choice(name, tuple(options), options[0])
    splits = tuple(sorted({(-1, *value[1:]) for value in values}))
    extent = max(math.prod(split[1:]) for split in splits)
    return RecordedSplit(name, extent, len(splits[0]), splits[0], recorded=splits)


def _points(knobs: Mapping[str, Knob], trials: list[Recorded]) -> np.ndarray:
    """The points of the trials, int32 (n, knobs), all at once: large spaces have some 100,000 configs."""
    columns = []
    for name, knob in knobs.items():
        values = [trial.config[name] for trial in trials]
        if isinstance(knob, RecordedSplit):
            values = [(-1, *value[1:]) for value in values]
        place = {option: i for i, option in enumerate(knob.options)}
        columns.append([place[value] for value in values])
    return np.array(columns, dtype=np.int32).T.copy()


def load(path: str | Path) -> Recording:
    """Read a recorded space.

    Args:
        path: a file of Kernel Tuner.

    Raises:
        RecordingError: the file is not there, or none of the kind, or has no knobs or no successful measurement.
    """
    content = _parse(Path(path))
    try:
        trials = list(_trials(content))
        if not any(math.isfinite(trial.cost) for trial in trials):
            raise RecordingError(f"{path} has no successful measurement among its {len(trials)} configs")
        if not trials[0].config:
            raise RecordingError(f"{path} has no parameters that were tuned")
        return Recording(trials)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        if isinstance(error, RecordingError):
            raise
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise RecordingError(f"{path} is no cache file of Kernel Tuner: {problem}") from error


def _parse(path: Path) -> Any:
    try:
        text = read_bytes(path, MAX_BYTES, unpack=True).decode()
    except (DamagedError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path} is neither JSON text nor JSON compressed by gzip: {error}") from error
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror or error}") from error
    # An interrupted run leaves the cache open, after the comma of its last whole line or within a line.
    text = text.rstrip()
    whole, _, _ = text.rpartition("\n")
    for begun, end in itertools.product((text, whole.rstrip()), ("", "}", "}}")):
        try:
            content = json.loads(begun.removesuffix(",") + end)
        except (ValueError, RecursionError, MemoryError):
            continue
        if isinstance(content, dict):
            return content
    raise RecordingError(f"{path} is no cache file of Kernel Tuner: not a JSON object")


def _trials(content: Mapping[str, Any]) -> Iterator[Recorded]:
    """The trials of a cache or of a file in the T4 format."""
    if "results" not in content:
        names, entries = content["tune_params_keys"], content["cache"]
        for entry in entries.values():
            yield Recorded({name: _value(entry[name]) for name in names}, _seconds(entry["time"]))
        return
    for result in content["results"]:
        times = [measurement["value"] for measurement in result["measurements"] if measurement["name"] == "time"]
        succeeded = result["invalidity"] == "correct" and times
        config = {name: _value(value) for name, value in result["configuration"].items()}
        yield Recorded(config, _seconds(times[0]) if succeeded else math.inf)


def _value(value: Any) -> float | str:
    if isinstance(value, (list, dict)):
        raise ValueError(f"a value that is {shown(value)}")
    if not isinstance(value, (int, float)):
        return str(value)
    if not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise ValueError(f"a value that is no number up to {MAX_NUMBER:g}: {shown(value)}")
    return value


def _seconds(milliseconds: Any) -> float:
    """Kernel Tuner has the name of an error in place of a time."""
    measured = isinstance(milliseconds, (int, float)) and LEAST_SECONDS <= milliseconds / 1e3 <= MOST_SECONDS
    return milliseconds / 1e3 if measured else math.inf
