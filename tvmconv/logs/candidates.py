"""What to build for a workload where logs shall say: configs that were measured, and at last one that was not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tvmconv import registry
from tvmconv.cost_model.recommend import recommend_configs
from tvmconv.devices import Device
from tvmconv.errors import ScheduleError
from tvmconv.logs.ranking import DeviceMatch, LogPaths, RecordIndex
from tvmconv.logs.record import Record
from tvmconv.space import Config
from tvmconv.workloads import Workload

DEFAULT_CONFIG, PREDICTED, TUNED = "default", "predicted", "tuned"


@dataclass(frozen=True)
class Candidate:
    """A schedule and a config of it.

    Attributes:
        schedule: how to compute the workload.
        config: a value for each knob.
        config_source: where the config is from, in a few words: `TUNED`, say, `PREDICTED` or `DEFAULT_CONFIG`.
    """

    schedule: registry.Schedule
    config: Config
    config_source: str


def iterate_candidates(logs: RecordIndex | LogPaths, workload: Workload, device: Device) -> Iterator[Candidate]:
    """What to build for a workload, the best first: of the records that serve it, then what the model predicts.

    Behind the first prediction comes a default config, so that whoever compares only some has one that is no guess.

    Records come in the order of `RecordIndex.iterate_applicable_records`. Those of schedules that are no more, or not
    for the workload, are left out; whether a config still is one of its schedule is seen when it is built.

    Args:
        logs: what they have; or a log, a folder of logs, or several of them.
        workload: what shall be computed.
        device: where, or the architecture to compile for.

    Raises:
        Error: a log cannot be read.
    """
    record_index = logs if isinstance(logs, RecordIndex) else RecordIndex(logs, workload)
    for device_match, record in record_index.iterate_applicable_records(workload, device):
        try:
            schedule = registry.find_schedule(workload, record.schedule)
            schedule.check_runs_on(device.kind, device.arch, device.text)
        except ScheduleError:
            continue
        yield Candidate(schedule, record.config, describe_config_source(device_match, record, workload))
    predicted_candidates = (
        Candidate(registry.find_schedule(workload, prediction.schedule), prediction.config, PREDICTED)
        for prediction in recommend_configs(workload, device)
    )
    yield from islice(predicted_candidates, 1)
    schedule = registry.schedules_to_tune(workload, device.kind, device.arch)[0]
    yield Candidate(schedule, schedule.space(workload, device.limits).default, DEFAULT_CONFIG)
    yield from predicted_candidates


def describe_config_source(device_match: DeviceMatch, record: Record, workload: Workload) -> str:
    """What is worth telling of a record that serves a workload."""
    epilogue_note = " without the epilogue" if record.workload != workload else ""
    return f"{TUNED}{epilogue_note}" + ("" if device_match is DeviceMatch.DEVICE else f" on {record.device}")
