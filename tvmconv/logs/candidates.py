"""What to build for a workload where logs shall say: configs that were measured, and at last one that was not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tvmconv import library
from tvmconv.devices import Device
from tvmconv.errors import ScheduleError
from tvmconv.knobs import Config
from tvmconv.knowledge.choose import promising
from tvmconv.logs.best import Nearness, Paths, Rankings
from tvmconv.logs.record import Record
from tvmconv.workloads import Workload

UNTUNED, PREDICTED, TUNED = "default", "predicted", "tuned"


@dataclass(frozen=True)
class Candidate:
    """A schedule and a config of it.

    Attributes:
        schedule: how to compute the workload.
        config: a value for each knob.
        origin: where the config is from, in a few words: `TUNED`, say, `PREDICTED` or `UNTUNED`.
    """

    schedule: library.Schedule
    config: Config
    origin: str


def candidates(logs: Rankings | Paths, workload: Workload, device: Device) -> Iterator[Candidate]:
    """What to build for a workload, the best first: of the records that serve it, then what the model predicts.

    Behind the first prediction comes a default config, so that whoever compares only some has one that is no guess.

    Records come in the order of `Rankings.serving`. Those of schedules that are no more, or not for the workload, are
    left out; whether a config still is one of its schedule is seen when it is built.

    Args:
        logs: what they have; or a log, a folder of logs, or several of them.
        workload: what shall be computed.
        device: where, or the architecture to compile for.

    Raises:
        Error: a log cannot be read.
    """
    rankings = logs if isinstance(logs, Rankings) else Rankings(logs, workload)
    for nearness, record in rankings.serving(workload, device):
        try:
            schedule = library.find(workload, record.schedule)
            schedule.check_runs_on(device.kind, device.arch, device.text)
        except ScheduleError:
            continue
        yield Candidate(schedule, record.config, origin(nearness, record, workload))
    predicted = (
        Candidate(library.find(workload, prediction.schedule), prediction.config, PREDICTED)
        for prediction in promising(workload, device)
    )
    yield from islice(predicted, 1)
    schedule = library.to_tune(workload, device.kind, device.arch)[0]
    yield Candidate(schedule, schedule.space(workload, device.limits).default, UNTUNED)
    yield from predicted


def origin(nearness: Nearness, record: Record, workload: Workload) -> str:
    """What is worth telling of a record that serves a workload."""
    without = " without the epilogue" if record.workload != workload else ""
    return f"{TUNED}{without}" + ("" if nearness is Nearness.DEVICE else f" on {record.device}")
