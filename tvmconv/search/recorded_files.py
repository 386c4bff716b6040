"""Recorded spaces in files and folders: those of Kernel Tuner, and those that tuning logs hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tvmconv import compat
from tvmconv.errors import RecordingError
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.record_key import RecordKey
from tvmconv.search.recorded_space import RecordedSpaceRunner, RecordedTrial, load_recorded_space
from tvmconv.space import Value

MIN_CONFIGS = 50  # configs that a log has of a space at least: of fewer every tuner soon knows the best
_LOG_SUFFIXES, _KERNEL_TUNER_SUFFIXES = (".jsonl",), (".json", ".json.gz")


def find_recorded_spaces(
    paths: Iterable[str | Path], min_configs: int = MIN_CONFIGS
) -> Iterator[tuple[str, RecordedSpaceRunner]]:
    """The recorded spaces of files and folders, with their names: the file's, and of logs what was tuned.

    Args:
        paths: files of Kernel Tuner, tuning logs (`.jsonl`), and folders, which are searched for both; in a folder,
            what is neither is passed over.
        min_configs: configs of which a log must know the cost or the failure, for a space.

    Raises:
        RecordingError: a file is named that is neither, or has no space; or a folder has none.
        Error: a file cannot be read.
    """
    for path in map(Path, paths):
        if not path.is_dir():
            yield from _read_file_spaces(path, min_configs)
            continue
        has_space = False
        for file in sorted(
            file for file in path.rglob("*") if file.name.endswith(_LOG_SUFFIXES + _KERNEL_TUNER_SUFFIXES)
        ):
            try:
                for named_space in _read_file_spaces(file, min_configs):
                    has_space = True
                    yield named_space
            except RecordingError:
                continue
        if not has_space:
            raise RecordingError(
                f"{path} has no recorded space: no file of Kernel Tuner, no log of {min_configs} configs"
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
            f"{path} has no workload and schedule with {min_configs} configs, one of them right{reason}"
        )
    for key, recording in spaces_by_key.items():
        yield f"{path}: {key.schedule} of {key.workload} on {key.device}", recording


def read_log_spaces(path: Path, min_configs: int, invalid_lines: InvalidLines) -> dict[RecordKey, RecordedSpaceRunner]:
    """The spaces of a log: of each workload, schedule and device the configs that were measured.

    Last timings are left out, being no trials. Where the knobs of a schedule have changed in the course of a log, the
    configs are those with the knobs that most have.

    Args:
        path: the log.
        min_configs: distinct configs at least; one of them must have succeeded.
        invalid_lines: lines that are no records are skipped and added here.

    Raises:
        Error: the file cannot be read.
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
    return {
        key: recording for key, recording in recordings.items() if len(recording.space.enumerated_legal) >= min_configs
    }


def _value_kind(value: Value) -> int | str:
    """What the values of one knob have in common: how many factors a split has, or what else it is."""
    if isinstance(value, tuple):
        return len(value)
    return "word" if isinstance(value, str) else "number"
