"""Candidates to build for a workload: configs of logs, then predicted, default and starting configs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from tvmconv import registry
from tvmconv.cost_model.predict import Prediction
from tvmconv.cost_model.recommend import recommend_configs
from tvmconv.devices import Device
from tvmconv.errors import ScheduleError
from tvmconv.logs.ranking import DeviceMatch, LogPaths, RecordIndex
from tvmconv.logs.record import Record
from tvmconv.space import Config
from tvmconv.workloads import Workload

DEFAULT_CONFIG, ESTIMATED, PREDICTED, TUNED = "default", "estimated", "predicted", "tuned"


@dataclass(frozen=True)
class Candidate:
    """A schedule and a config of it."""

    schedule: registry.Schedule
    config: Config
    # Source of the config, a text that starts with `TUNED`, `PREDICTED`, `DEFAULT_CONFIG` or `ESTIMATED`.
    config_source: str
    seconds: float | None = None  # measured or predicted seconds per launch


def iterate_candidates(
    logs: RecordIndex | LogPaths, workload: Workload, device: Device, predictions: Sequence[Prediction] | None = None
) -> Iterator[Candidate]:
    """Yield the candidates for a workload, the best first: records, then predicted configs.

    A default config follows the first prediction, so that a comparison of only some candidates includes it. The configs
    with which a search starts, which have the best estimates, come last: the cost model predicts no gradients. Records
    come in the order of `RecordIndex.iterate_applicable_records`. Records whose schedules no longer exist or do not
    apply are left out. A config that its schedule no longer has fails only when it is built.

    `logs`: index of the records, or the path of a log or of a folder of logs, or several of them.
    `device`: device to run on, or architecture to compile for.
    `predictions`: predictions of `recommend_configs`; by default, they are made after the last record.
    """
    record_index = logs if isinstance(logs, RecordIndex) else RecordIndex(logs, workload)
    for device_match, record in record_index.iterate_applicable_records(workload, device):
        try:
            schedule = registry.find_schedule(workload, record.schedule)
            schedule.check_runs_on(device.kind, device.arch, device.text)
        except ScheduleError:
            continue
        yield Candidate(schedule, record.config, describe_config_source(device_match, record, workload), record.cost)
    predicted_candidates = (
        Candidate(
            registry.find_schedule(workload, prediction.schedule), prediction.config, PREDICTED, prediction.seconds
        )
        for prediction in (recommend_configs(workload, device) if predictions is None else predictions)
    )
    yield from islice(predicted_candidates, 1)
    schedule = registry.schedules_to_tune(workload, device.kind, device.arch)[0]
    space = schedule.space(workload, device.limits)
    yield Candidate(schedule, space.default, DEFAULT_CONFIG)
    yield from predicted_candidates
    default_point = space.project(space.default)
    for config in schedule.list_starting_configs(workload):
        point = space.project(config)
        if space.is_legal(point[None])[0] and (point != default_point).any():
            yield Candidate(schedule, config, ESTIMATED)


def describe_config_source(device_match: DeviceMatch, record: Record, workload: Workload) -> str:
    """Return a text on the source of a record's config, with its differences from the workload and the device."""
    epilogue_note = " without the epilogue" if record.workload != workload else ""
    return f"{TUNED}{epilogue_note}" + ("" if device_match is DeviceMatch.DEVICE else f" on {record.device}")
