"""What a search begins with: the schedules' spaces and tuners, what is known to be good, inputs and a reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvmconv import registry
from tvmconv.cost_model.recommend import make_prior, recommend_configs
from tvmconv.devices import Device
from tvmconv.errors import KnobError, ScheduleError
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.packaged import packaged_logs
from tvmconv.logs.ranking import list_log_files
from tvmconv.logs.record import Record
from tvmconv.measure.reference_data import ProblemPrefetcher
from tvmconv.search import tuners
from tvmconv.search.options import TuneOptions
from tvmconv.search.portfolio import LOW_PRIORITY_WEIGHT, PortfolioMember, PortfolioSearch, Proposal
from tvmconv.search.tuners.bayesian import BayesianTuner
from tvmconv.search.warm_start import find_nearest_workload_configs
from tvmconv.space.search_space import Space
from tvmconv.workloads import Workload

NUM_WARM_START_WORKLOADS = 4  # workloads whose best configs are tried first, for each schedule
NUM_PREDICTED_CONFIGS = 16  # configs that the model thinks most of, before these
NUM_LEADING_PREDICTIONS = (
    3  # of them, before the defaults: one that the model knows nothing of may be faster than all that it names
)
UNINFORMED_TUNERS = ("random", "grid")  # tuners that begin with nothing: the yardsticks


@dataclass(frozen=True)
class ScheduleSelection:
    """The schedules that take part in a search.

    Attributes:
        high_priority: those that promise most.
        low_priority: those that seldom win: their defaults are measured, and they are searched if these are fast.
        is_explicit: whether the caller named them; then no other schedule of the log is the result of the search.
    """

    high_priority: Sequence[registry.Schedule]
    low_priority: Sequence[registry.Schedule] = ()
    is_explicit: bool = False

    @classmethod
    def resolve(
        cls, workload: Workload, requested: Sequence[str | registry.Schedule], device: Device
    ) -> ScheduleSelection:
        """Those that were named, by name or as found by the library; if none was, all that can win.

        Raises:
            ScheduleError: there is no such schedule for the workload, or none at all for the device.
        """
        schedules = [registry.as_schedule(workload, schedule) for schedule in requested]
        if schedules:
            return cls(schedules, is_explicit=True)
        high_priority = registry.schedules_to_tune(workload, device.kind, device.arch)
        return cls(high_priority, registry.low_priority_schedules(workload, device.kind, device.arch))


def create_search(
    workload: Workload, selection: ScheduleSelection, device: Device, options: TuneOptions
) -> PortfolioSearch:
    """The spaces and tuners of all schedules, and what is known to be good.

    A schedule that fails with its default config is left out, with a line in the log.

    Raises:
        ScheduleError: all schedules fail.
        Error: a log cannot be read.
    """
    transfer_logs = list_log_files(options.transfer_logs)
    members, failures = [], []
    for schedule in (*selection.high_priority, *selection.low_priority):
        try:
            tuner = tuners.create_tuner(options.tuner, schedule.space(workload, device.limits), options.seed)
            tuner.space.compute_usage(tuner.space.project({})[None])
        except ScheduleError as failure:
            registry.report_skipped_schedule(failure)
            failures.append(failure)
            continue
        if isinstance(tuner, BayesianTuner):
            for space, records in _read_transfer_trials(schedule, workload, transfer_logs, device):
                tuner.tell_transfer_trials(space, records)
            if prior := make_prior(workload, schedule.name, tuner.space, device):
                tuner.set_prior(prior)
        members.append(
            PortfolioMember(schedule, tuner, LOW_PRIORITY_WEIGHT if schedule in selection.low_priority else 1.0)
        )
    if failures and not members:
        raise failures[0]
    if options.tuner in UNINFORMED_TUNERS:
        return PortfolioSearch(members)
    return PortfolioSearch(members, _iterate_enqueued(workload, selection, device, options, members))


def _iterate_enqueued(
    workload: Workload,
    selection: ScheduleSelection,
    device: Device,
    options: TuneOptions,
    members: Sequence[PortfolioMember],
) -> Iterator[list[Proposal]]:
    """What is known to be good, in portions; the first is there at once, and the logs are read only for the others."""
    spaces = {member.schedule.name: member.tuner.space for member in members}
    defaults = [(name, space.default) for name, space in spaces.items()]
    num_high_priority = sum(member.schedule in selection.high_priority for member in members)
    predictions = recommend_configs(workload, device, NUM_PREDICTED_CONFIGS, spaces)[:NUM_PREDICTED_CONFIGS]
    predicted_configs = [(prediction.schedule, prediction.config) for prediction in predictions]
    yield [*predicted_configs[:NUM_LEADING_PREDICTIONS], *defaults[:num_high_priority]]
    own_log = Path(options.log)
    logs = [*list_log_files(options.transfer_logs), *([own_log] if own_log.exists() else []), *packaged_logs()]
    yield [
        *predicted_configs[NUM_LEADING_PREDICTIONS:],
        *find_nearest_workload_configs(logs, workload, list(spaces), device.kind, NUM_WARM_START_WORKLOADS),
        *defaults[num_high_priority:],
    ]


def _read_transfer_trials(
    schedule: registry.Schedule, workload: Workload, logs: Iterable[Path], device: Device
) -> Iterator[tuple[Space, list[Record]]]:
    """Trials of a schedule that logs have of other workloads: of each, and of each device, with their space.

    Devices of another kind are left out, and so is what the schedule does not compute, or not any more.
    """
    records_by_task: dict[tuple[Workload, str], list[Record]] = {}
    for log in logs:
        for record in read_records(log, InvalidLines()):
            is_usable = record.schedule == schedule.name and record.target.split(maxsplit=1)[:1] == [device.kind]
            if is_usable and record.workload != workload and not record.final:
                records_by_task.setdefault((record.workload, record.device), []).append(record)
    for (other_workload, _), records in records_by_task.items():
        with contextlib.suppress(ScheduleError, KnobError):
            if schedule.is_applicable(other_workload):
                yield schedule.space(other_workload, device.limits), records


class SearchPrefetcher:
    """Problems and contests for workloads that will be searched, made while another search waits for its trials.

    Attributes:
        problems: inputs and references.
    """

    def __init__(self) -> None:
        self.problems = ProblemPrefetcher()
        self._searches: dict[Workload, PortfolioSearch] = {}

    def prepare(self, workload: Workload, selection: ScheduleSelection, device: Device, options: TuneOptions) -> None:
        """Make what the search of a workload will need. Raises as `create_search` does."""
        self.problems.prefetch(workload, options.verify)
        self._searches[workload] = create_search(workload, selection, device, options)

    def pop_search(
        self, workload: Workload, selection: ScheduleSelection, device: Device, options: TuneOptions
    ) -> PortfolioSearch:
        """The contest that was prepared for a workload, for one search alone; else a new one."""
        return self._searches.pop(workload, None) or create_search(workload, selection, device, options)
