"""Training: measured logs become a `Knowledge`."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tvmconv import library
from tvmconv.arithmetic import ceil_div
from tvmconv.devices.cuda import device as cuda
from tvmconv.errors import DeviceError, Error, KnobError, RecordError, ScheduleError
from tvmconv.files import LimitedGzip
from tvmconv.knobs import Config
from tvmconv.knobs.space import Space
from tvmconv.knowledge.features import Machine, features, matrix
from tvmconv.knowledge.likeness import layer_of
from tvmconv.knowledge.model import Example, Expert, Knowledge, kind_of, known_for
from tvmconv.knowledge.trees import Trees
from tvmconv.logs.lines import BadLines, read_lines
from tvmconv.logs.log import read
from tvmconv.logs.record import Record
from tvmconv.workloads import Conv, Workload

MEMBERS = 3
TREES = {"max_depth": 7, "eta": 0.06, "subsample": 0.7, "colsample_bynode": 0.5, "min_child_weight": 2.0, "lambda": 1.0}
ROUNDS = 250
FEWEST = 40  # records of a schedule that are worth a model
FEWEST_EACH = 5  # configs of a workload, on average: the defaults alone do not tell one config from another
FEWEST_OF_A_KIND = 2  # workloads of a dtype and layout: what one took says nothing of others
FEWEST_EXAMPLES, OFTEN = 5, 0.2  # workloads on which it is fast, and their share: else how slow it is matters to nobody
EXAMPLES = 2  # of the fastest configs of each workload
EXAMPLE_SHARE = 0.7  # of the speed of the fastest schedule, from which on a workload is an example for a schedule
PORTFOLIO, MOST_CONFIGS = 24, 160  # how many are chosen, of how many
WORTH = 2.0  # a config counts for so many powers of its share of the speed of the workload's fastest


@dataclass(frozen=True)
class Sample:
    """What was measured of one schedule on one workload.

    Attributes:
        workload: the workload.
        space: of the schedule.
        points: the configs that are in the space: (n, knobs).
        seconds: of a launch of each: (n,).
        best: the fastest of any schedule.
    """

    workload: Conv
    space: Space
    points: np.ndarray
    seconds: np.ndarray
    best: float


def measured(log: Path) -> Iterator[Record]:
    """The valid records of a log, which may be compressed by gzip.

    Raises:
        Error: the log cannot be read.
    """
    if log.suffix != ".gz":
        yield from (record for record in read(log, BadLines()) if record.ok)
        return
    try:
        for line in read_lines(log, opener=LimitedGzip):
            with contextlib.suppress(RecordError):
                record = Record.parse(line.text)
                if record.ok:
                    yield record
    except (EOFError, zlib.error) as error:  # it is cut off, or damaged
        raise Error(f"cannot read {log}: {error}") from error


def machine_of(record: Record) -> Machine:
    """The numbers of the device of a record: of one that is here, or as a model has them.

    Raises:
        Error: it is not here, and the model in use is of another one.
    """
    with contextlib.suppress(DeviceError):
        for device in cuda.devices():
            if device.name == record.device and device.peak_flops and device.peak_bandwidth:
                found = (device.multiprocessors or 1, device.peak_flops, device.peak_bandwidth)
                return Machine(device.name, str(device.arch), *found)
    arch = record.target.partition("-arch=")[2].split(" ")[0]
    known = known_for(arch)
    if known and known.machine.name == record.device:
        return known.machine
    raise Error(f"the peaks of {record.device} are not known here: train where it is")


def samples(
    records: Iterable[Record], told: Callable[[str], None] | None = None
) -> dict[tuple[str, str], list[Sample]]:
    """Records of one device as samples, by operator and schedule.

    Records of schedules that are no more, and of configs that their spaces do not have by now, are left out. Of several
    records of a config the last timing counts, or the latest.
    """
    found: dict[Workload, dict[str, dict[str, Record]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        if not (record.ok and isinstance(record.workload, Conv)):
            continue
        there = found[record.workload][record.schedule]
        before = there.get(record.identity[-1])
        if before is None or record.final or not before.final:
            there[record.identity[-1]] = record
    made: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for workload, by_schedule in found.items():
        if told:
            told(workload.text)
        best = min(record.cost for own in by_schedule.values() for record in own.values())
        for name, own in by_schedule.items():
            try:
                space = library.find(workload, name).space(workload)
            except (ScheduleError, KnobError):
                continue
            points, seconds = [], []
            for record in own.values():
                try:
                    points.append(space.point(record.config))
                except KnobError:
                    continue
                seconds.append(record.cost)
            if points:
                assert isinstance(workload, Conv)
                sample = Sample(workload, space, np.stack(points), np.array(seconds), best)
                made[workload.operator, name].append(sample)
    return made


def train(
    by_schedule: Mapping[tuple[str, str], Sequence[Sample]],
    machine: Machine,
    provenance: str = "",
    told: Callable[[str], None] | None = None,
) -> Knowledge:
    """Learn from samples; of a schedule from those of all its operators, so that images tell of volumes and signals."""
    of_schedule: dict[str, list[Sample]] = defaultdict(list)
    for (_, schedule), found in by_schedule.items():
        of_schedule[schedule] += found
    experts, taught = {}, set[str]()
    for schedule, own in of_schedule.items():
        count = sum(len(sample.points) for sample in own)
        if count < max(FEWEST, FEWEST_EACH * len(own)) or _fast(own) < max(FEWEST_EXAMPLES, OFTEN * len(own)):
            continue
        if told:
            told(schedule)
        experts[schedule] = _expert(schedule, own, machine)
        taught |= {layer_of(sample.workload) for sample in own}
    return Knowledge(machine, experts, provenance, frozenset(taught))


def _expert(schedule: str, own: Sequence[Sample], machine: Machine) -> Expert:
    columns = [features(sample.workload, sample.space, sample.points, machine) for sample in own]
    names = tuple(sorted({name for each in columns for name in each}))
    rows = np.concatenate([matrix(each, names) for each in columns])
    slowness = np.concatenate([np.log2(s.seconds / machine.least_seconds(s.workload)) for s in own])
    weights = np.concatenate([_weights(sample) for sample in own])
    group = np.concatenate([np.full(len(sample.points), number) for number, sample in enumerate(own)])
    rng = np.random.default_rng(0)
    members = []
    for number in range(MEMBERS):
        drawn = np.bincount(rng.integers(len(own), size=len(own)), minlength=len(own)) if number else np.ones(len(own))
        counts = np.maximum(drawn, 0.1)[group]  # a member knows less of what others know well, but not nothing
        members.append(_forest(rows, slowness, weights * counts, number))
    knobs = tuple(dict.fromkeys(name for sample in own for name in sample.space.knobs))
    kinds = _kinds(own)
    expert = Expert(schedule, knobs, kinds, names, tuple(members), examples=tuple(_examples(own)))
    return replace(expert, portfolio=_portfolio(expert, own, machine))


def _fast(own: Iterable[Sample]) -> int:
    """On how many workloads the schedule was nearly as fast as any."""
    return sum(bool(sample.seconds.min() <= sample.best / EXAMPLE_SHARE) for sample in own)


def _kinds(own: Sequence[Sample]) -> tuple[str, ...]:
    """The dtypes and layouts of which there are workloads enough, and on some of which the schedule was fast."""
    of_kind: dict[str, list[Sample]] = defaultdict(list)
    for sample in own:
        of_kind[kind_of(sample.workload)].append(sample)
    known = (kind for kind, found in of_kind.items() if len(found) >= FEWEST_OF_A_KIND)
    return tuple(sorted(kind for kind in known if _fast(of_kind[kind]) >= OFTEN * len(of_kind[kind])))


def _weights(sample: Sample) -> np.ndarray:
    """How much each record of a workload counts: fast ones most, and all of a workload no more than a few."""
    worth = np.maximum((sample.best / sample.seconds) ** WORTH, 0.05)
    return worth / math.sqrt(worth.sum())


def _forest(rows: np.ndarray, targets: np.ndarray, weights: np.ndarray, seed: int) -> Trees:
    import xgboost as xgb

    data = xgb.DMatrix(rows, label=targets.astype(np.float32), weight=weights)
    return Trees.of_booster(xgb.train({**TREES, "seed": seed, "verbosity": 0}, data, ROUNDS))


def _examples(own: Sequence[Sample]) -> Iterable[Example]:
    for sample in own:
        for place in np.argsort(sample.seconds, kind="stable")[:EXAMPLES]:
            share = float(sample.best / sample.seconds[place])
            if share >= EXAMPLE_SHARE:
                yield Example(sample.workload.text, sample.space.config(sample.points[place]), round(share, 3))


def _portfolio(expert: Expert, own: Sequence[Sample], machine: Machine) -> tuple[Config, ...]:
    """Configs of which the model takes one or another to be fast on most workloads, chosen greedily.

    What a further config saves becomes less with each, so that the greedy choice saves at least 1 - 1/e of what is
    possible (Nemhauser, Wolsey, Fisher, "An analysis of approximations for maximizing submodular set functions", 1978).
    """
    tried = [sample.space.config(sample.points[sample.seconds.argmin()]) for sample in own]
    configs = [config for number, config in enumerate(tried) if config not in tried[:number]]
    configs = configs[:: ceil_div(len(configs), MOST_CONFIGS)]
    slowness = np.empty((len(configs), len(own)))
    for column, sample in enumerate(own):
        points = np.stack([sample.space.nearest(config) for config in configs])
        expected = expert.slowness(sample.workload, sample.space, points, machine).mean(axis=0)
        slowness[:, column] = np.where(sample.space.legal(points), expected, np.inf)
    least = np.minimum(slowness.min(axis=0), 20.0)
    reached, chosen = np.full(len(own), 6.0), list[int]()  # 64 times as long, until there is any
    for _ in range(min(PORTFOLIO, len(configs))):
        lost = np.minimum(slowness - least, reached).sum(axis=1)
        lost[chosen] = np.inf
        chosen.append(int(lost.argmin()))
        reached = np.minimum(reached, slowness[chosen[-1]] - least)
    return tuple(configs[i] for i in chosen)
