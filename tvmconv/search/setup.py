"""The start of a search: search spaces and tuners of the schedules, first candidates, inputs and reference outputs."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from tvmconv import registry
from tvmconv.cost_model.equivalent import SCHEDULES_IN_BYTES, make_16_bit_equivalent
from tvmconv.cost_model.recommend import make_prior, recommend_configs
from tvmconv.cost_model.similarity import workload_distance
from tvmconv.devices import Device
from tvmconv.errors import KnobError, ScheduleError, ScheduleFailure
from tvmconv.logs.index import LogIndex, index_unchanged_log
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.packaged import packaged_logs
from tvmconv.logs.ranking import iterate_fastest_first, list_log_files
from tvmconv.logs.record import Record, RecordKey
from tvmconv.measure.reference_data import ProblemPrefetcher
from tvmconv.measure.workers.pool import resolve_num_workers
from tvmconv.search import tuners
from tvmconv.search.options import TuneOptions
from tvmconv.search.portfolio import LOW_PRIORITY_WEIGHT, PortfolioMember, PortfolioSearch, Proposal
from tvmconv.search.tuners.bayesian import BayesianTuner
from tvmconv.space import Config
from tvmconv.space.search_space import Space
from tvmconv.workloads import Workload
from tvmconv.workloads.conv_operator import ConvOperator

NUM_WARM_START_WORKLOADS = 4  # number of nearest workloads whose best configs are enqueued, for each schedule
MAX_WINOGRAD_GAIN = 4.0  # products saved by the largest tiles of the Winograd schedules, F(4×4, 3×3)
NUM_PREDICTED_CONFIGS = 16  # number of configs that the cost model predicts to be the fastest, enqueued before these
# Number of predicted configs that are enqueued before the remaining defaults. Defaults come early, because a schedule
# that the cost model does not cover may be faster than all predictions.
NUM_LEADING_PREDICTIONS = 3
UNINFORMED_TUNERS = ("random", "grid")  # tuners without first candidates, as they are references for the others


@dataclass(frozen=True)
class ScheduleSelection:
    """The schedules of a search."""

    high_priority: Sequence[registry.Schedule]  # schedules that are searched
    # Schedules that are seldom the fastest. Their defaults are measured, and they are searched only if these are fast.
    low_priority: Sequence[registry.Schedule] = ()
    # Whether the caller named the schedules; then the result of the search is a record of one of them.
    is_explicit: bool = False

    @classmethod
    def resolve(
        cls, workload: Workload, requested: Sequence[str | registry.Schedule], device: Device
    ) -> ScheduleSelection:
        """Select the requested schedules; if there are none, all schedules that may be the fastest."""
        schedules = [registry.as_schedule(workload, schedule) for schedule in requested]
        if schedules:
            return cls(schedules, is_explicit=True)
        high_priority = registry.schedules_to_tune(workload, device.kind, device.arch)
        return cls(high_priority, registry.low_priority_schedules(workload, device.kind, device.arch))


def create_search(
    workload: Workload, selection: ScheduleSelection, device: Device, options: TuneOptions
) -> PortfolioSearch:
    """Create the search spaces and tuners of all schedules, and enqueue the first candidates. A schedule whose space or
    default config fails is skipped with a warning.
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
            if prior := make_prior(workload, schedule.name, tuner.space, device):
                tuner.set_prior(prior)
            for space, records in _read_transfer_trials(schedule, workload, transfer_logs, device):
                tuner.tell_transfer_trials(space, records)
        weight = LOW_PRIORITY_WEIGHT if schedule in selection.low_priority else 1.0
        members.append(PortfolioMember(schedule, tuner, weight, _estimate_min_seconds(workload, schedule, device)))
    if failures and not members:
        raise failures[0]
    if options.tuner in UNINFORMED_TUNERS:
        return PortfolioSearch(members)
    return PortfolioSearch(members, _iterate_enqueued(workload, selection, device, options, members))


def _estimate_min_seconds(workload: Workload, schedule: registry.Schedule, device: Device) -> float:
    """Return a lower bound of the seconds of each config of a schedule; 0 if unknown. A schedule for all GPUs computes
    on CUDA cores, at best by Winograd's algorithm if the filter has several taps.
    """
    if not device.peak_flops or schedule.min_arch or schedule.exact_arch:
        return 0.0
    has_one_tap = isinstance(workload, ConvOperator) and math.prod(workload.kernel) == 1
    return workload.flops / (1.0 if has_one_tap else MAX_WINOGRAD_GAIN) / device.peak_flops


def _iterate_enqueued(
    workload: Workload,
    selection: ScheduleSelection,
    device: Device,
    options: TuneOptions,
    members: Sequence[PortfolioMember],
) -> Iterator[list[Proposal]]:
    """Yield the first candidates in batches. The first one keeps the builders busy while the cost model predicts the
    next. The last one needs the logs, which take time to read.
    """
    spaces = {member.schedule.name: member.tuner.space for member in members}
    defaults = [(name, space.default) for name, space in spaces.items()]
    num_high_priority = sum(member.schedule in selection.high_priority for member in members)
    own_configs = [*defaults[:num_high_priority], *_list_starting_configs(workload, members[:num_high_priority])]
    given_configs = [(name, config) for name, config in options.first_configs if name in spaces]
    yield [*given_configs, *own_configs][: resolve_num_workers(options.workers)]
    predictions = recommend_configs(workload, device, NUM_PREDICTED_CONFIGS, spaces)[:NUM_PREDICTED_CONFIGS]
    predicted_configs = [(prediction.schedule, prediction.config) for prediction in predictions]
    yield [*predicted_configs[:NUM_LEADING_PREDICTIONS], *own_configs]
    own_log = Path(options.log)
    logs = [*list_log_files(options.transfer_logs), *([own_log] if own_log.exists() else []), *packaged_logs()]
    yield [
        *predicted_configs[NUM_LEADING_PREDICTIONS:],
        *find_nearest_workload_configs(logs, workload, list(spaces), device.kind, NUM_WARM_START_WORKLOADS),
        *defaults[num_high_priority:],
    ]


def _list_starting_configs(workload: Workload, members: Sequence[PortfolioMember]) -> list[Proposal]:
    """Return the configs with which schedules start their search, besides their defaults. A schedule whose function
    fails is reported, and has none.
    """
    proposals: list[Proposal] = []
    for member in members:
        try:
            configs = member.schedule.list_starting_configs(workload)
        except ScheduleFailure as failure:
            registry.report_skipped_schedule(failure)
            continue
        proposals += [(member.schedule.name, config) for config in configs]
    return proposals


def _read_transfer_trials(
    schedule: registry.Schedule, workload: Workload, logs: Iterable[Path], device: Device
) -> Iterator[tuple[Space, list[Record]]]:
    """Yield the search space and the trials of a schedule for each other workload and each device in the logs. Devices
    of other kinds are left out, and so are workloads that the schedule does not support (any longer).
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


def find_nearest_workload_configs(
    logs: Iterable[Path], workload: Workload, schedules: Sequence[str], device_kind: str, max_workloads: int
) -> list[tuple[str, Config]]:
    """Return the fastest config of each of the nearest workloads in logs, with its schedule, the nearest first. Records
    of other kinds of devices do not count. `max_workloads` is for each schedule. Workloads of 16 bits are near to one
    of 8 bits if they are to its equivalent, for schedules whose knobs state bytes.
    """
    if not isinstance(workload, ConvOperator):
        return []
    if equivalent := make_16_bit_equivalent(workload):
        names = [name for name in schedules if name in SCHEDULES_IN_BYTES]
        configs = find_nearest_workload_configs(logs := [*logs], equivalent, names, device_kind, max_workloads)
        own_configs = _find_nearest_configs(logs, workload, schedules, device_kind, max_workloads)
        return [*own_configs, *configs]
    return _find_nearest_configs(logs, workload, schedules, device_kind, max_workloads)


def _find_nearest_configs(
    logs: Iterable[Path], workload: Workload, schedules: Sequence[str], device_kind: str, max_workloads: int
) -> list[tuple[str, Config]]:
    """Return the fastest config of each of the nearest workloads with the same number of bits."""
    indexes: dict[tuple[str, Workload], list[tuple[RecordKey, LogIndex]]] = {}
    for log in logs:
        for key, log_index in index_unchanged_log(log).items():
            if key.schedule in schedules and key.target.split(maxsplit=1)[:1] == [device_kind]:
                indexes.setdefault((key.schedule, key.workload), []).append((key, log_index))
    ranked_configs: list[tuple[int, str, Config]] = []
    for name in schedules:
        distances = [(workload_distance(workload, w), str(w), w) for schedule, w in indexes if schedule == name]
        nearest = sorted(entry for entry in distances if math.isfinite(entry[0]) and entry[2] != workload)
        for order, (_, _, other_workload) in enumerate(nearest[:max_workloads]):
            record = next(iterate_fastest_first(indexes[name, other_workload]), None)
            if record is not None:
                ranked_configs.append((order, name, record.config))
    return [(name, config) for _, name, config in sorted(ranked_configs, key=lambda ranked: ranked[0])]


class SearchPrefetcher:
    """Inputs and portfolios for later searches, prepared by threads while another search waits for its trials."""

    def __init__(self) -> None:
        self.problems = ProblemPrefetcher()
        self._searches: dict[Workload, Future[PortfolioSearch]] = {}

    def prepare(self, workload: Workload, selection: ScheduleSelection, device: Device, options: TuneOptions) -> None:
        """Start to prepare the search of a workload; `pop_search` raises its errors."""
        self.problems.prefetch(workload, options.verify)
        future = self._searches[workload] = Future[PortfolioSearch]()

        def create() -> None:
            try:
                search = create_search(workload, selection, device, options)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(search)
                search.list_legal_configs()

        threading.Thread(target=create, name="search", daemon=True).start()

    def pop_search(
        self, workload: Workload, selection: ScheduleSelection, device: Device, options: TuneOptions
    ) -> PortfolioSearch:
        """Remove and return the prepared search of a workload; create one if there is none."""
        if future := self._searches.pop(workload, None):
            return future.result()
        search = create_search(workload, selection, device, options)
        threading.Thread(target=search.list_legal_configs, name="legal configs", daemon=True).start()
        return search
