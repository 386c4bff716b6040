"""Recorded spaces in files and folders: files of Kernel Tuner, and tuning logs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tvmconv import compat
from tvmconv.errors import RecordingError
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.record import RecordKey
from tvmconv.search.recorded_space import RecordedSpaceRunner, RecordedTrial, load_recorded_space
from tvmconv.space import Value

MIN_CONFIGS = 50  # every tuner soon finds the best of fewer configs
_LOG_SUFFIXES, _KERNEL_TUNER_SUFFIXES = (".jsonl",), (".json", ".json.gz")


def find_recorded_spaces(
    paths: Iterable[str | Path], min_configs: int = MIN_CONFIGS
) -> Iterator[tuple[str, RecordedSpaceRunner]]:
    """Yield the recorded spaces of files and folders, with their names.

    The name is that of the file; for a log, also the schedule, the workload and the device.

    Args:
        paths: Files of Kernel Tuner, tuning logs (`.jsonl`), and folders that are searched for both. Other files in
            folders are skipped.
        min_configs: Minimum number of configs that a log must have for a space.

    Raises:
        RecordingError: A named file has another format or no space, or a folder has no space.
        Error: A file cannot be read.
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
    """Return the recorded spaces of a log: the measured configs of each workload, schedule and device.

    Final timings are left out, because they are not trials. If the knobs of a schedule have changed in the course of a
    log, the space has the configs with the most frequent set of knobs.

    Args:
        path: Log.
        min_configs: Minimum number of distinct configs, of which at least one must have succeeded.
        invalid_lines: Collects the lines that are not records, which are skipped.

    Raises:
        Error: The file cannot be read.
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
