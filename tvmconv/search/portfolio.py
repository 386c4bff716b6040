"""Portfolio search: one search over several schedules, which allocates the trials to them."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tvmconv.errors import ScheduleFailure
from tvmconv.logs.record import Record
from tvmconv.registry import Schedule, report_skipped_schedule
from tvmconv.search.tuners import Tuner
from tvmconv.space import Config

Proposal = tuple[str, Config]  # name of a schedule, and a config of it

ALLOCATION_EXPONENT = 8  # a schedule whose best config takes 1.2 times as long gets a quarter of the trials
MAX_INITIAL_FAILURES = 3  # number of failures after which a schedule that never succeeded gets `FAILED_WEIGHT`
FAILED_WEIGHT = 1e-6
LOW_PRIORITY_WEIGHT = 0.5  # weight of schedules that are seldom the fastest; other schedules have weight 1
NUM_LOCAL_SEARCH_STARTS = 5  # number of fastest configs whose neighbours are tried at the end


@dataclass
class PortfolioMember:
    """A schedule of the portfolio."""

    schedule: Schedule
    tuner: Tuner
    weight: float = 1.0  # weight of the schedule before any trial, at most 1
    min_seconds: float = 0.0  # lower bound of the time of each config; 0 if unknown
    num_proposed: int = 0  # number of proposed configs, or of trials if that is larger
    best_seconds: float = math.inf  # seconds per launch of the fastest config
    is_exhausted: bool = field(default=False, init=False)  # whether the tuner has no more configs to propose
    # Whether the schedule's own code has raised an exception; then no more configs are proposed.
    has_failed: bool = field(default=False, init=False)
    num_trials: int = field(default=0, init=False)

    @property
    def is_low_priority(self) -> bool:
        """Whether the schedule is seldom the fastest."""
        return self.weight < 1

    @property
    def is_unexplored(self) -> bool:
        """Whether there are too few trials to judge the schedule."""
        return not math.isfinite(self.best_seconds) and self.num_trials < MAX_INITIAL_FAILURES

    def allocation_weight(self, best_seconds: float) -> float:
        """Return the weight divided by the trials so far; `best_seconds` is the fastest time of all members."""
        weight = self.weight
        if math.isfinite(self.best_seconds):
            weight *= (best_seconds / self.best_seconds) ** ALLOCATION_EXPONENT
        elif not self.is_unexplored:
            weight *= FAILED_WEIGHT
        return weight / (self.num_proposed + 1)


class PortfolioSearch:
    """One search over several schedules. The enqueued configs come first: predicted configs, the schedules' defaults,
    and configs that were fast for other workloads. Then each schedule gets trials by the time of its best config, and
    its own tuner proposes them. At the end, the neighbours of the fastest configs are tried. The next batch is
    requested only when all configs of the previous one were proposed.
    """

    def __init__(self, members: Sequence[PortfolioMember], enqueued: Iterable[Iterable[Proposal]] = ()) -> None:
        self._members: Mapping[str, PortfolioMember] = {member.schedule.name: member for member in members}
        self._enqueued_batches = iter(enqueued)
        self._enqueued: deque[Proposal] = deque()  # remaining proposals of the current batch
        self._postponed: list[Proposal] = []  # of low-priority schedules, until a high-priority one has a time
        self._dequeued: list[Proposal] = []
        self._fastest_records: list[Record] = []

    @property
    def _best_seconds(self) -> float:
        """Seconds per launch of the fastest config of all schedules."""
        return min((member.best_seconds for member in self._members.values()), default=math.inf)

    @property
    def _postpones_low_priority(self) -> bool:
        """Whether configs of low-priority schedules wait, because no high-priority schedule was judged. Such a config
        may take a thousand times as long as the others, and would be the result of a search that is cut off.
        """
        high_priority = [member for member in self._members.values() if not member.is_low_priority]
        return bool(high_priority) and all(member.is_unexplored for member in high_priority)

    @property
    def batch_size(self) -> int:
        """Number of configs that the tuners prefer to propose before they learn the costs."""
        return sum(member.tuner.batch_size for member in self._members.values() if not member.is_low_priority)

    def list_legal_configs(self) -> None:
        """List the legal configs of the search spaces in advance, which another thread may do: it takes up to seconds,
        and the tuners draw their first proposals from the list. Errors of a schedule are raised where it is needed.
        """
        for member in self._members.values():
            if not member.is_low_priority:
                with contextlib.suppress(Exception):
                    _ = member.tuner.space.enumerated_legal

    def tell(self, records: Sequence[Record]) -> None:
        """Update the tuners with the costs of configs; each record has to be passed only once."""
        for name, member in self._members.items():
            member_records = [record for record in records if record.schedule == name]
            if member_records:
                member.tuner.tell(member_records)
                member.best_seconds = min(member.best_seconds, *(record.cost for record in member_records))
                member.num_trials += len(member_records)
                # Records of earlier sessions or of other searches were not proposed here.
                member.num_proposed = max(member.num_proposed, member.num_trials)
        valid_records = [record for record in records if record.ok and record.schedule in self._members]
        records_by_cost = sorted([*self._fastest_records, *valid_records], key=lambda record: record.cost)
        self._fastest_records = records_by_cost[:NUM_LOCAL_SEARCH_STARTS]

    def ask(self, max_configs: int, *, is_final_phase: bool = False, skip_model: bool = False) -> list[Proposal]:
        """Propose configs that were not proposed or learnt before. In the final phase, neighbours of the fastest
        configs come first. There are no proposals if the search spaces are exhausted.
        """
        if proposals := self._ask_enqueued(max_configs, self._postpones_low_priority):
            return proposals  # without further ones, because a tuner takes time to propose
        if is_final_phase:
            proposals += self._ask_neighbors_of_best(max_configs, skip_model)
        while len(proposals) < max_configs and (allocation := self._allocate_trials(max_configs - len(proposals))):
            for name, num_trials in allocation.items():
                member = self._members[name]
                query = functools.partial(member.tuner.ask, num_trials, skip_model=skip_model)
                configs = _query_tuner(member, query)
                member.is_exhausted = len(configs) < num_trials
                proposals += [(name, config) for config in configs]
        return proposals or self._ask_enqueued(max_configs, postpones=False)

    def _ask_enqueued(self, max_configs: int, postpones: bool) -> list[Proposal]:
        """Propose the legal configs nearest to the enqueued ones that are new, of one batch at a time. Those of
        low-priority schedules are postponed on request, and left out if they cannot be the fastest.
        """
        proposals: list[Proposal] = []
        best_seconds = self._best_seconds
        if not postpones:
            self._enqueued.extend(self._postponed)
            self._postponed.clear()
        while max_configs > 0 and not proposals:
            if not self._enqueued:
                batch = next(self._enqueued_batches, None)
                if batch is None:
                    break
                self._enqueued.extend(batch)
            while self._enqueued and len(proposals) < max_configs:
                name, config = self._enqueued.popleft()
                member = self._members[name]
                if member.is_low_priority and postpones:
                    self._postponed.append((name, config))
                    continue
                if (name, config) in self._dequeued or member.min_seconds > best_seconds:
                    continue
                self._dequeued.append((name, config))
                configs = _query_tuner(member, functools.partial(_claim_nearest_legal, member.tuner, config))
                member.num_proposed += len(configs)
                proposals += [(name, config) for config in configs]
        return proposals

    def _ask_neighbors_of_best(self, max_configs: int, skip_model: bool) -> list[Proposal]:
        proposals: list[Proposal] = []
        for record in self._fastest_records if max_configs > 0 else ():
            member = self._members[record.schedule]
            num_missing = max_configs - len(proposals)
            query = functools.partial(member.tuner.ask_neighbors, record.config, num_missing, skip_model=skip_model)
            configs = _query_tuner(member, query)
            proposals += [(record.schedule, config) for config in configs]
        return proposals

    def _allocate_trials(self, num_trials: int) -> dict[str, int]:
        """Return how many of the next `num_trials` trials each schedule gets; none if all spaces are exhausted."""
        eligible = [member for member in self._members.values() if not member.is_exhausted]
        best_seconds = self._best_seconds
        high_priority = [member for member in eligible if not member.is_low_priority]
        if any(member.is_unexplored for member in high_priority):
            eligible = high_priority  # low-priority schedules cannot be compared with these yet
        else:
            eligible = [m for m in eligible if not (m.is_low_priority and m.is_unexplored)] or eligible
        allocation: dict[str, int] = {}
        for _ in range(num_trials if eligible else 0):
            member = max(eligible, key=lambda candidate: candidate.allocation_weight(best_seconds))
            member.num_proposed += 1
            allocation[member.schedule.name] = allocation.get(member.schedule.name, 0) + 1
        return allocation


def _query_tuner(member: PortfolioMember, query: Callable[[], list[Config]]) -> list[Config]:
    """Return the configs that a member's tuner proposes; none once the schedule's own code has failed."""
    if member.has_failed:
        return []
    try:
        return query()
    except ScheduleFailure as failure:
        member.has_failed = member.is_exhausted = True
        report_skipped_schedule(failure)
        return []


def _claim_nearest_legal(tuner: Tuner, config: Config) -> list[Config]:
    """Claim the legal config nearest to a config of another space, if it is new."""
    space = tuner.space
    point = space.project(config)
    legal_points = [point] if space.is_legal(point[None])[0] else space.list_neighbors(point)
    return tuner.claim_points(legal_points, 1)
