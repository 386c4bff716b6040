"""Recorded spaces: search spaces in which every config was measured, so that tuners can be evaluated without a device.

The files are tuning logs and those of Kernel Tuner (https://kerneltuner.github.io): a cache, complete or of an
interrupted run, or a list of results in the T4 format (https://github.com/odgaard/TuningSchema); plain or compressed by
gzip. Files for many kernels and GPUs are published at https://github.com/AutoTuningAssociation/benchmark_hub.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tvmconv import compat
from tvmconv.errors import RecordingError
from tvmconv.files import DamagedFileError, read_bytes
from tvmconv.jsonfile import abbreviate_value
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.record import RecordKey
from tvmconv.search.tuners import Tuner, find_tuner
from tvmconv.space import ChoiceKnob, Config, Knob, SplitKnob, Value
from tvmconv.space.search_space import Space

CHECKPOINTS = (10, 25, 50, 100, 200)
MIN_CONFIGS = 50  # every tuner soon finds the best of fewer configs
MAX_KNOB_VALUE = 1e15
MAX_BYTES = 1 << 29  # maximum size of a decompressed file
MIN_SECONDS, MAX_SECONDS = 1e-12, 1e9  # a time of a launch outside this range counts as a failure
_LOG_SUFFIXES, _KERNEL_TUNER_SUFFIXES = (".jsonl",), (".json", ".json.gz")


@dataclass(frozen=True)
class RecordedTrial:
    """A config and its cost, a `Trial` that a tuner learns from."""

    config: Config  # values by knob name
    cost: float  # seconds per launch; infinite for a config that failed


@dataclass(frozen=True, eq=False)
class RecordedSpace(Space):
    """A search space whose legal points are the recorded ones."""

    points: np.ndarray = field(kw_only=True, repr=False)  # legal points, int32 (n, knobs), ordered by index

    @property
    def enumerated_legal(self) -> np.ndarray:
        """Recorded points."""
        return self.points

    def is_legal(self, points: np.ndarray) -> np.ndarray:
        """Return which points (n, knobs) were recorded: bool (n,)."""
        return np.array([point.tobytes() in self._point_keys for point in points.astype(np.int32)], dtype=bool)

    @functools.cached_property
    def _point_keys(self) -> set[bytes]:
        return {point.tobytes() for point in self.points}


@dataclass(frozen=True)
class RecordedSplit(SplitKnob):
    """A split knob with the recorded values; its extent is that of the largest recorded tile."""

    # Values of the knob, each with -1 as its first factor.
    recorded_values: tuple[tuple[int, ...], ...] = field(kw_only=True, repr=False)

    @property
    def options(self) -> tuple[tuple[int, ...], ...]:
        """Recorded values of the knob."""
        return self.recorded_values

    @property
    def size(self) -> int:
        """Number of recorded values."""
        return len(self.recorded_values)


class RecordedSpaceRunner:
    """A runner that returns recorded costs instead of measuring. All trials have the same knobs; of several trials of
    one config the last one counts.
    """

    def __init__(self, trials: list[RecordedTrial], schedule: str | None = None):
        knobs = {
            name: _make_knob(name, [trial.config[name] for trial in trials], schedule) for name in trials[0].config
        }
        points = _encode_points(knobs, trials)
        self._seconds_by_point = {point.tobytes(): trial.cost for point, trial in zip(points, trials, strict=True)}
        self.space = RecordedSpace(knobs, points=np.unique(points, axis=0))
        self.best_seconds = min(self._seconds_by_point.values())

    def measure(self, config: Config) -> RecordedTrial:
        """Return the recorded trial of `config`, which has to be legal."""
        return RecordedTrial(config, self._seconds_by_point[self.space.point_from_config(config).tobytes()])

    @property
    def num_failed(self) -> int:
        """Number of configs that failed."""
        return sum(math.isinf(cost) for cost in self._seconds_by_point.values())


def _make_knob(name: str, values: list[Value], schedule: str | None) -> Knob:
    if not isinstance(values[0], tuple):
        options = sorted(set(values), key=lambda value: compat.former_value(schedule, name, value))
        return ChoiceKnob(name, tuple(options), options[0])
    splits = tuple(sorted({(-1, *value[1:]) for value in values}))
    extent = max(math.prod(split[1:]) for split in splits)
    return RecordedSplit(name, extent, len(splits[0]), splits[0], recorded_values=splits)


def _encode_points(knobs: Mapping[str, Knob], trials: list[RecordedTrial]) -> np.ndarray:
    """Return the points of the trials, int32 (n, knobs); one column at a time, as spaces may have 100,000 configs."""
    columns = []
    for name, knob in knobs.items():
        values = [trial.config[name] for trial in trials]
        if isinstance(knob, RecordedSplit):
            values = [(-1, *value[1:]) for value in values]
        option_index = {option: index for index, option in enumerate(knob.options)}
        columns.append([option_index[value] for value in values])
    return np.array(columns, dtype=np.int32).T.copy()


def load_recorded_space(path: str | Path) -> RecordedSpaceRunner:
    """Read a recorded space from a file of Kernel Tuner."""
    content = _parse_cache(Path(path))
    try:
        trials = list(_iterate_trials(content))
        if not any(math.isfinite(trial.cost) for trial in trials):
            raise RecordingError(f"{path} has no successful measurement among its {len(trials)} configs")
        if not trials[0].config:
            raise RecordingError(f"{path} has no parameters that were tuned")
        return RecordedSpaceRunner(trials)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        if isinstance(error, RecordingError):
            raise
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise RecordingError(f"{path} is not a cache file of Kernel Tuner: {problem}") from error


def _parse_cache(path: Path) -> Any:
    try:
        text = read_bytes(path, MAX_BYTES, unpack=True).decode()
    except (DamagedFileError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path} is neither JSON text nor JSON compressed by gzip: {error}") from error
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror or error}") from error
    # An interrupted run leaves the cache without its closing braces, and its last line may be incomplete.
    text = text.rstrip()
    whole_lines, _, _ = text.rpartition("\n")
    for prefix, closing_braces in itertools.product((text, whole_lines.rstrip()), ("", "}", "}}")):
        try:
            content = json.loads(prefix.removesuffix(",") + closing_braces)
        except (ValueError, RecursionError, MemoryError):
            continue
        if isinstance(content, dict):
            return content
    raise RecordingError(f"{path} is not a cache file of Kernel Tuner: expected a JSON object")


def _iterate_trials(content: Mapping[str, Any]) -> Iterator[RecordedTrial]:
    """Yield the trials of a cache or of a file in the T4 format."""
    if "results" not in content:
        names, entries = content["tune_params_keys"], content["cache"]
        for entry in entries.values():
            yield RecordedTrial({name: _parse_value(entry[name]) for name in names}, _parse_seconds(entry["time"]))
        return
    for result in content["results"]:
        times = [measurement["value"] for measurement in result["measurements"] if measurement["name"] == "time"]
        has_succeeded = result["invalidity"] == "correct" and times
        config = {name: _parse_value(value) for name, value in result["configuration"].items()}
        yield RecordedTrial(config, _parse_seconds(times[0]) if has_succeeded else math.inf)


def _parse_value(value: Any) -> float | str:
    if isinstance(value, (list, dict)):
        raise ValueError(f"expected a number or a text as the value of a knob, not {abbreviate_value(value)}")
    if not isinstance(value, (int, float)):
        return str(value)
    if not -MAX_KNOB_VALUE <= value <= MAX_KNOB_VALUE:
        raise ValueError(f"expected a value of at most {MAX_KNOB_VALUE:g}, not {abbreviate_value(value)}")
    return value


def _parse_seconds(milliseconds: Any) -> float:
    """Return seconds; infinity if the file has the name of an error, as Kernel Tuner writes it, or another value."""
    is_measured = isinstance(milliseconds, (int, float)) and MIN_SECONDS <= milliseconds / 1e3 <= MAX_SECONDS
    return milliseconds / 1e3 if is_measured else math.inf


def find_recorded_spaces(
    paths: Iterable[str | Path], min_configs: int = MIN_CONFIGS
) -> Iterator[tuple[str, RecordedSpaceRunner]]:
    """Yield the recorded spaces of files and folders, with their names. The name is that of the file; for a log, also
    the schedule, the workload and the device. Paths are files of Kernel Tuner, logs (`.jsonl`), and folders that are
    searched for both.
    """
    for path in map(Path, paths):
        if not path.is_dir():
            yield from _read_file_spaces(path, min_configs)
            continue
        has_space = False
        suffixes = _LOG_SUFFIXES + _KERNEL_TUNER_SUFFIXES
        for file in sorted(file for file in path.rglob("*") if file.name.endswith(suffixes)):
            try:
                for named_space in _read_file_spaces(file, min_configs):
                    has_space = True
                    yield named_space
            except RecordingError:
                continue
        if not has_space:
            raise RecordingError(
                f"{path} has no recorded space: expected a file of Kernel Tuner, or a log of {min_configs} configs"
            )


def _read_file_spaces(path: Path, min_configs: int) -> Iterator[tuple[str, RecordedSpaceRunner]]:
    if not path.name.endswith(_LOG_SUFFIXES):
        yield str(path), load_recorded_space(path)
        return
    invalid_lines = InvalidLines()
    spaces_by_key = read_log_spaces(path, min_configs, invalid_lines)
    if not spaces_by_key:
        reason = f": {invalid_lines}" if invalid_lines.count else ""
        raise RecordingError(
            f"{path} has no workload and schedule with {min_configs} configs, at least one of them valid{reason}"
        )
    for key, recording in spaces_by_key.items():
        yield f"{path}: {key.schedule} of {key.workload} on {key.device}", recording


def read_log_spaces(path: Path, min_configs: int, invalid_lines: InvalidLines) -> dict[RecordKey, RecordedSpaceRunner]:
    """Return the recorded spaces of a log: the measured configs of each workload, schedule and device. Final timings
    are left out, because they are not trials. If the knobs of a schedule have changed in the course of a log, the space
    has the configs with the most frequent set of knobs. At least one of `min_configs` distinct configs must have
    succeeded.
    """
    trials: dict[RecordKey, dict[tuple[Any, ...], list[RecordedTrial]]] = {}
    for record in read_records(path, invalid_lines):
        if not record.final and record.config:
            config = dict(sorted(record.config.items(), key=lambda item: compat.former_knob(record.schedule, item[0])))
            knob_kinds = tuple((name, _value_kind(value)) for name, value in config.items())
            trials.setdefault(record.key, {}).setdefault(knob_kinds, []).append(RecordedTrial(config, record.cost))
    largest_trials = {key: max(trials_by_kind.values(), key=len) for key, trials_by_kind in trials.items()}
    recordings = {
        key: RecordedSpaceRunner(key_trials, key.schedule)
        for key, key_trials in largest_trials.items()
        if len(key_trials) >= min_configs and any(math.isfinite(trial.cost) for trial in key_trials)
    }
    return {key: each for key, each in recordings.items() if len(each.space.enumerated_legal) >= min_configs}


def _value_kind(value: Value) -> int | str:
    """Return what all values of one knob have in common: the number of factors of a split, or the kind of value."""
    if isinstance(value, tuple):
        return len(value)
    return "word" if isinstance(value, str) else "number"


@dataclass(frozen=True)
class SimulatedSearch:
    """One simulated search."""

    # Throughput of the best config so far divided by that of the optimum, after each trial: float (trials,). It is 0
    # until the first config succeeds.
    relative_throughput: np.ndarray
    seconds: float  # wall time in the tuner

    @staticmethod
    def average(searches: Sequence[SimulatedSearch]) -> SimulatedSearch:
        """Return the mean of searches with equal numbers of trials."""
        mean_throughput = np.mean([simulated.relative_throughput for simulated in searches], axis=0)
        return SimulatedSearch(mean_throughput, float(np.mean([simulated.seconds for simulated in searches])))


@dataclass(frozen=True)
class SimulationSummary:
    """Simulated searches by one tuner with several seeds."""

    tuner: str
    searches: Sequence[SimulatedSearch]  # one search for each seed

    def get_throughput_after(self, num_trials: int) -> np.ndarray:
        """Return the relative throughput of each seed after `num_trials` trials: float (seeds,)."""
        return np.array([simulated.relative_throughput[num_trials - 1] for simulated in self.searches])

    @property
    def mean_seconds(self) -> float:
        """Mean wall time of a search in the tuner, in seconds."""
        return float(np.mean([simulated.seconds for simulated in self.searches]))


def simulate_search(
    recording: RecordedSpaceRunner, tuner: str | type[Tuner], num_trials: int, seed: int
) -> SimulatedSearch:
    """Simulate the search of a tuner in a recorded space, in batches of the tuner's `batch_size`. In a smaller space,
    the last relative throughput is repeated.
    """
    searcher = (find_tuner(tuner) if isinstance(tuner, str) else tuner)(recording.space, seed)
    costs: list[float] = []
    tuner_seconds = 0.0
    while len(costs) < num_trials:
        start = time.perf_counter()
        configs = searcher.ask(min(searcher.batch_size, num_trials - len(costs)))
        measured_trials = [recording.measure(config) for config in configs]
        searcher.tell(measured_trials)
        tuner_seconds += time.perf_counter() - start
        if not measured_trials:
            break
        costs += [trial.cost for trial in measured_trials]
    throughput = recording.best_seconds / np.minimum.accumulate(costs)
    return SimulatedSearch(np.pad(throughput, (0, num_trials - len(throughput)), mode="edge"), tuner_seconds)


def select_checkpoints(num_trials: int) -> list[int]:
    """Return the numbers of trials after which results are reported: `CHECKPOINTS` below the last, and the last."""
    return sorted({*(n for n in CHECKPOINTS if n < num_trials), num_trials})
