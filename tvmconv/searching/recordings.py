"""Recorded spaces in files and folders: those of Kernel Tuner, and those that tuning logs hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tvmconv.errors import RecordingError
from tvmconv.knobs import Value
from tvmconv.logs.lines import BadLines
from tvmconv.logs.log import read
from tvmconv.logs.subject import Subject
from tvmconv.searching.replay import Recorded, Recording, load

FEWEST = 50  # configs that a log has of a space at least: of fewer every tuner soon knows the best
_OURS, _OTHERS = (".jsonl",), (".json", ".json.gz")


def find(paths: Iterable[str | Path], fewest: int = FEWEST) -> Iterator[tuple[str, Recording]]:
    """The recorded spaces of files and folders, with their names: the file's, and of logs what was tuned.

    Args:
        paths: files of Kernel Tuner, tuning logs (`.jsonl`), and folders, which are searched for both; in a folder,
            what is neither is passed over.
        fewest: configs of which a log must know the cost or the failure, for a space.

    Raises:
        RecordingError: a file is named that is neither, or has no space; or a folder has none.
        Error: a file cannot be read.
    """
    for path in map(Path, paths):
        if not path.is_dir():
            yield from _of_file(path, fewest)
            continue
        found = False
        for file in sorted(file for file in path.rglob("*") if file.name.endswith(_OURS + _OTHERS)):
            try:
                for named in _of_file(file, fewest):
                    found = True
                    yield named
            except RecordingError:
                continue
        if not found:
            raise RecordingError(f"{path} has no recorded space: no file of Kernel Tuner, no log of {fewest} configs")


def _of_file(path: Path, fewest: int) -> Iterator[tuple[str, Recording]]:
    if not path.name.endswith(_OURS):
        yield str(path), load(path)
        return
    bad = BadLines()
    found = of_log(path, fewest, bad)
    if not found:
        reason = f": {bad}" if bad.count else ""
        raise RecordingError(f"{path} has no workload and schedule with {fewest} configs, one of them right{reason}")
    for subject, recording in found.items():
        yield f"{path}: {subject.schedule} of {subject.workload} on {subject.device}", recording


def of_log(path: Path, fewest: int, bad: BadLines) -> dict[Subject, Recording]:
    """The spaces of a log: of each workload, schedule and device the configs that were measured.

    Last timings are left out, being no trials. Where the knobs of a schedule have changed in the course of a log, the
    configs are those with the knobs that most have.

    Args:
        path: the log.
        fewest: distinct configs at least; one of them must have succeeded.
        bad: lines that are no records are skipped and added here.

    Raises:
        Error: the file cannot be read.
    """
    trials: dict[Subject, dict[tuple[Any, ...], list[Recorded]]] = {}
    for record in read(path, bad):
        if not record.final and record.config:
            config = dict(sorted(record.config.items()))
            alike = tuple((name, _kind(value)) for name, value in config.items())
            trials.setdefault(record.subject, {}).setdefault(alike, []).append(Recorded(config, record.cost))
    largest = {subject: max(by_kind.values(), key=len) for subject, by_kind in trials.items()}
    recordings = {
        subject: Recording(found)
        for subject, found in largest.items()
        if len(found) >= fewest and any(math.isfinite(trial.cost) for trial in found)
    }
    return {subject: each for subject, each in recordings.items() if len(each.space.listed) >= fewest}


def _kind(value: Value) -> int | str:
    """What the values of one knob have in common: how many factors a split has, or what else it is."""
    if isinstance(value, tuple):
        return len(value)
    return "word" if isinstance(value, str) else "number"
