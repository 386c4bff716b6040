"""Training of a `CostModel` from tuning logs."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tvmconv import registry
from tvmconv.arithmetic import ceil_div
from tvmconv.compat import split_feature
from tvmconv.cost_model.features import build_matrix, compute_features
from tvmconv.cost_model.model import CostModel, MeasuredExample, ScheduleModel, cost_model_for, describe_workload_kind
from tvmconv.cost_model.similarity import layer_key
from tvmconv.cost_model.trees import Trees
from tvmconv.devices.cuda import device as cuda
from tvmconv.errors import DeviceError, Error, KnobError, RecordError, ScheduleError
from tvmconv.files import PACKED_SUFFIXES, LimitedPackedFile
from tvmconv.logs.lines import InvalidLines, read_lines
from tvmconv.logs.log import read_records
from tvmconv.logs.record import Record
from tvmconv.space import Config
from tvmconv.space.search_space import Space
from tvmconv.target import DATA_SHEET_TARGETS, Target
from tvmconv.workloads import Workload
from tvmconv.workloads.conv_operator import ConvOperator

NUM_MEMBERS = 3
BOOSTER_PARAMETERS = {
    "max_depth": 7,
    "eta": 0.06,
    "subsample": 0.7,
    "colsample_bynode": 0.5,
    "min_child_weight": 2.0,
    "lambda": 1.0,
}
BOOSTING_ROUNDS = 250
MIN_RECORDS = 40  # minimum number of records of a schedule
MIN_CONFIGS_PER_WORKLOAD = 5  # minimum mean number of configs, as defaults alone do not distinguish configs
MIN_WORKLOADS_PER_KIND = 2  # minimum number of workloads of each dtype and layout
MIN_FAST_WORKLOADS, MIN_FAST_FRACTION = 5, 0.2  # minimum number and fraction of workloads on which a schedule is fast
EXAMPLES_PER_WORKLOAD = 2
MIN_EXAMPLE_THROUGHPUT = 0.7  # throughput relative to the fastest schedule from which a config is an example
PORTFOLIO_SIZE, MAX_PORTFOLIO_CANDIDATES = 24, 160
WEIGHT_EXPONENT = 2.0  # exponent of a config's relative throughput in its weight


@dataclass(frozen=True)
class TrainingSample:
    """The measurements of one schedule on one workload."""

    workload: ConvOperator
    space: Space  # search space of the schedule
    points: np.ndarray  # points of the measured configs (n, knobs)
    seconds: np.ndarray  # seconds per launch, float (n,)
    best_seconds: float  # seconds per launch of the fastest config of any schedule
    device_spec: Target | None = None  # the device of the measurements; None for that of the cost model


def read_valid_records(log: Path) -> Iterator[Record]:
    """Yield the valid records of a log, which may be compressed by gzip or xz."""
    if log.suffix not in PACKED_SUFFIXES:
        yield from (record for record in read_records(log, InvalidLines()) if record.ok)
        return
    for line in read_lines(log, opener=LimitedPackedFile):
        with contextlib.suppress(RecordError):
            record = Record.parse(line.text)
            if record.ok:
                yield record


def find_record_device_spec(record: Record) -> Target:
    """Return the peak rates of a record's device, from a GPU of this host, the cost model in use, or a data sheet."""
    with contextlib.suppress(DeviceError):
        for device in cuda.list_cuda_devices():
            if device.name == record.device and device.target:
                return device.target
    arch = record.target.partition("-arch=")[2].split(" ")[0]
    cost_model = cost_model_for(arch)
    if cost_model and cost_model.device_spec.name == record.device:
        return cost_model.device_spec
    if record.device in DATA_SHEET_TARGETS:
        return DATA_SHEET_TARGETS[record.device]
    raise Error(f"the peak rates of {record.device} are unknown on this host: train on a host with this device")


def collect_samples(
    records: Iterable[Record],
    on_progress: Callable[[str], None] | None = None,
    device_specs: Mapping[str, Target] | None = None,
) -> dict[tuple[str, str], list[TrainingSample]]:
    """Return the training samples of records, by operator and schedule. Records of schedules and configs that no longer
    exist are left out. Of several records of a config, the latest final timing counts, or else the latest record.
    `device_specs` has the peak rates of devices other than that of the cost model, by name.
    """
    records_by_workload: dict[tuple[str, Workload], dict[str, dict[str, Record]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for record in records:
        if not (record.ok and isinstance(record.workload, ConvOperator)):
            continue
        records_by_config = records_by_workload[record.device, record.workload][record.schedule]
        earlier_record = records_by_config.get(record.identity[-1])
        if earlier_record is None or record.final or not earlier_record.final:
            records_by_config[record.identity[-1]] = record
    samples_by_schedule: dict[tuple[str, str], list[TrainingSample]] = defaultdict(list)
    for (device_name, workload), by_schedule in records_by_workload.items():
        if on_progress:
            on_progress(workload.text)
        device_spec = (device_specs or {}).get(device_name)
        best_seconds = min(record.cost for by_config in by_schedule.values() for record in by_config.values())
        for schedule_name, by_config in by_schedule.items():
            try:
                space = registry.find_schedule(workload, schedule_name).space(workload)
            except (ScheduleError, KnobError):
                continue
            points, seconds = [], []
            for record in by_config.values():
                try:
                    points.append(space.point_from_config(record.config))
                except KnobError:
                    continue
                seconds.append(record.cost)
            if points:
                assert isinstance(workload, ConvOperator)
                sample = TrainingSample(workload, space, np.stack(points), np.array(seconds), best_seconds, device_spec)
                samples_by_schedule[workload.operator, schedule_name].append(sample)
    return samples_by_schedule


def train(
    by_schedule: Mapping[tuple[str, str], Sequence[TrainingSample]],
    device_spec: Target,
    provenance: str = "",
    on_progress: Callable[[str], None] | None = None,
) -> CostModel:
    """Train a cost model. The model of a schedule learns from the samples of all operators, so that images inform
    volumes and signals. Schedules that have too few samples or are rarely fast are left out.
    """
    samples_by_name: dict[str, list[TrainingSample]] = defaultdict(list)
    for (_, schedule), schedule_samples in by_schedule.items():
        samples_by_name[schedule] += schedule_samples
    schedule_models, training_layers = {}, set[str]()
    for schedule, own_samples in samples_by_name.items():
        num_points = sum(len(sample.points) for sample in own_samples)
        if num_points < max(MIN_RECORDS, MIN_CONFIGS_PER_WORKLOAD * len(own_samples)):
            continue
        if _count_fast_workloads(own_samples) < max(MIN_FAST_WORKLOADS, MIN_FAST_FRACTION * len(own_samples)):
            continue
        if on_progress:
            on_progress(schedule)
        schedule_models[schedule] = _train_schedule_model(schedule, own_samples, device_spec)
        training_layers |= {layer_key(sample.workload) for sample in own_samples}
    return CostModel(device_spec, schedule_models, provenance, frozenset(training_layers))


def _train_schedule_model(schedule: str, own_samples: Sequence[TrainingSample], device_spec: Target) -> ScheduleModel:
    specs = [sample.device_spec or device_spec for sample in own_samples]
    columns = [
        compute_features(sample.workload, sample.space, sample.points, spec)
        for sample, spec in zip(own_samples, specs, strict=True)
    ]
    names = tuple(sorted({name for sample_columns in columns for name in sample_columns}))
    all_knobs = [name for sample in own_samples for name in sample.space.knobs]
    lacked = [split_feature(name)[0] for name in names if any(name not in each for each in columns)]
    knobs = tuple(dict.fromkeys([*all_knobs, *lacked]))
    inputs = np.concatenate([build_matrix(sample_columns, names, knobs) for sample_columns in columns])
    log2_slowdowns = np.concatenate(
        [
            np.log2(sample.seconds / spec.roofline_seconds(sample.workload))
            for sample, spec in zip(own_samples, specs, strict=True)
        ]
    )
    weights = np.concatenate([_compute_weights(sample) for sample in own_samples])
    sample_index = np.concatenate([np.full(len(sample.points), index) for index, sample in enumerate(own_samples)])
    rng = np.random.default_rng(0)
    members, num_samples = [], len(own_samples)
    for index in range(NUM_MEMBERS):
        sample_counts: np.ndarray = np.ones(num_samples)
        if index:  # a bootstrap sample of the workloads, in which the others keep a small weight
            sample_counts = np.bincount(rng.integers(num_samples, size=num_samples), minlength=num_samples)
        counts = np.maximum(sample_counts, 0.1)[sample_index]
        members.append(_train_trees(inputs, log2_slowdowns, weights * counts, index))
    kinds = _select_kinds(own_samples)
    schedule_model = ScheduleModel(
        schedule, knobs, kinds, names, tuple(members), examples=tuple(_iterate_examples(own_samples))
    )
    return replace(schedule_model, portfolio=_choose_portfolio(schedule_model, own_samples, device_spec))


def _count_fast_workloads(own_samples: Iterable[TrainingSample]) -> int:
    """Return the number of workloads on which the schedule is nearly as fast as the fastest one."""
    return sum(bool(sample.seconds.min() <= sample.best_seconds / MIN_EXAMPLE_THROUGHPUT) for sample in own_samples)


def _select_kinds(own_samples: Sequence[TrainingSample]) -> tuple[str, ...]:
    """Return the dtypes and layouts with enough workloads, on enough of which the schedule is fast."""
    samples_by_kind: dict[str, list[TrainingSample]] = defaultdict(list)
    for sample in own_samples:
        samples_by_kind[describe_workload_kind(sample.workload)].append(sample)
    kinds = [
        kind
        for kind, samples in samples_by_kind.items()
        if len(samples) >= MIN_WORKLOADS_PER_KIND and _count_fast_workloads(samples) >= MIN_FAST_FRACTION * len(samples)
    ]
    return tuple(sorted(kinds))


def _compute_weights(sample: TrainingSample) -> np.ndarray:
    """Return the weight of each record; fast ones have the largest, and the total grows slowly with their number."""
    record_weights = np.maximum((sample.best_seconds / sample.seconds) ** WEIGHT_EXPONENT, 0.05)
    return record_weights / math.sqrt(record_weights.sum())


def _train_trees(inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray, seed: int) -> Trees:
    import xgboost as xgb

    training_data = xgb.DMatrix(inputs, label=targets.astype(np.float32), weight=weights)
    return Trees.from_booster(
        xgb.train({**BOOSTER_PARAMETERS, "seed": seed, "verbosity": 0}, training_data, BOOSTING_ROUNDS)
    )


def _iterate_examples(own_samples: Sequence[TrainingSample]) -> Iterable[MeasuredExample]:
    for sample in own_samples:
        for point_index in np.argsort(sample.seconds, kind="stable")[:EXAMPLES_PER_WORKLOAD]:
            throughput = float(sample.best_seconds / sample.seconds[point_index])
            if throughput >= MIN_EXAMPLE_THROUGHPUT:
                config = sample.space.config_from_point(sample.points[point_index])
                yield MeasuredExample(sample.workload.text, config, round(throughput, 3))


def _choose_portfolio(
    schedule_model: ScheduleModel, own_samples: Sequence[TrainingSample], device_spec: Target
) -> tuple[Config, ...]:
    """Return configs of which at least one is predicted to be fast on most workloads, chosen greedily. The gain of a
    further config decreases with each one (it is submodular), so the greedy choice reaches at least 1 - 1/e of the
    optimum (Nemhauser, Wolsey, Fisher, "An analysis of approximations for maximizing submodular set functions", 1978).
    """
    fastest_configs = [sample.space.config_from_point(sample.points[sample.seconds.argmin()]) for sample in own_samples]
    configs = [config for index, config in enumerate(fastest_configs) if config not in fastest_configs[:index]]
    configs = configs[:: ceil_div(len(configs), MAX_PORTFOLIO_CANDIDATES)]
    log2_slowdowns = np.empty((len(configs), len(own_samples)))
    for sample_index, sample in enumerate(own_samples):
        points = np.stack([sample.space.project(config) for config in configs])
        predicted = schedule_model.log2_slowdown(sample.workload, sample.space, points, device_spec).mean(axis=0)
        log2_slowdowns[:, sample_index] = np.where(sample.space.is_legal(points), predicted, np.inf)
    min_slowdown = np.minimum(log2_slowdowns.min(axis=0), 20.0)
    reached_slowdown = np.full(len(own_samples), 6.0)  # a slowdown of 64 before the first config is chosen
    chosen_indices: list[int] = []
    for _ in range(min(PORTFOLIO_SIZE, len(configs))):
        excess_slowdown = np.minimum(log2_slowdowns - min_slowdown, reached_slowdown).sum(axis=1)
        excess_slowdown[chosen_indices] = np.inf
        chosen_indices.append(int(excess_slowdown.argmin()))
        reached_slowdown = np.minimum(reached_slowdown, log2_slowdowns[chosen_indices[-1]] - min_slowdown)
    return tuple(configs[chosen_index] for chosen_index in chosen_indices)
