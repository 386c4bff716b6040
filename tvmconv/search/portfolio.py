"""Several schedules for one workload, searched as one: which config of which of them to measure next."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tvmconv.errors import ScheduleFailure
from tvmconv.logs.record import Record
from tvmconv.registry import Schedule, report_skipped_schedule
from tvmconv.search.tuners import Tuner
from tvmconv.space import Config

Proposal = tuple[str, Config]  # a schedule's name, and a config of it

ALLOCATION_EXPONENT = 8  # a schedule whose best takes 1.2 times as long gets a quarter of the trials
MAX_INITIAL_FAILURES = 3  # failures of a schedule that never succeeded, after which others come first
FAILED_WEIGHT = 1e-6  # the weight of these
LOW_PRIORITY_WEIGHT = 0.5  # the weight of schedules that seldom win, beside those that mostly do
NUM_LOCAL_SEARCH_STARTS = 5  # of the fastest configs, whose neighbours are tried in the end


@dataclass
class PortfolioMember:
    """A schedule that takes part.

    Attributes:
        schedule: the schedule.
        tuner: proposes its configs.
        weight: how much it promises before anything is known: 1, or less.
        num_proposed: how many of its configs were proposed, or learnt if that is more.
        best_seconds: of its fastest config, in seconds a launch.
        is_exhausted: whether its tuner has no more configs to propose.
        has_failed: whether its own code raised an exception when it was asked what configs use; no more are proposed
            then.
    """

    schedule: Schedule
    tuner: Tuner
    weight: float = 1.0
    num_proposed: int = 0
    best_seconds: float = math.inf
    is_exhausted: bool = field(default=False, init=False)
    has_failed: bool = field(default=False, init=False)
    num_trials: int = field(default=0, init=False)

    @property
    def is_low_priority(self) -> bool:
        """Whether it seldom wins."""
        return self.weight < 1

    @property
    def is_unexplored(self) -> bool:
        """Whether nothing can be said of it yet."""
        return not math.isfinite(self.best_seconds) and self.num_trials < MAX_INITIAL_FAILURES

    def allocation_weight(self, best_seconds: float) -> float:
        """Return the weight over the trials so far; `best_seconds` is the fastest time of all members."""
        weight = self.weight
        if math.isfinite(self.best_seconds):
            weight *= (best_seconds / self.best_seconds) ** ALLOCATION_EXPONENT
        elif not self.is_unexplored:
            weight *= FAILED_WEIGHT
        return weight / (self.num_proposed + 1)


class PortfolioSearch:
    """One search over several schedules.

    What is known to be good comes first: the schedules' defaults, and configs that were fast elsewhere. Then trials go
    to the schedules by how fast their best is, each chosen by the schedule's own tuner; in the end, to the whole
    neighbourhoods of the fastest configs.

    Args:
        members: the schedules, those that promise most first.
        enqueued: configs to measure first, by schedule, in the order of their promise; in portions, each of which is
            asked for only when all before it were proposed.
    """

    def __init__(self, members: Sequence[PortfolioMember], enqueued: Iterable[Iterable[Proposal]] = ()) -> None:
        self._members: Mapping[str, PortfolioMember] = {member.schedule.name: member for member in members}
        self._enqueued_batches = iter(enqueued)
        self._enqueued: deque[Proposal] = deque()  # what is left of the present portion
        self._dequeued: list[Proposal] = []
        self._fastest_records: list[Record] = []

    @property
    def batch_size(self) -> int:
        """How many configs the tuners like to propose before they learn what they cost."""
        return sum(member.tuner.batch_size for member in self._members.values() if not member.is_low_priority)

    def tell(self, records: Sequence[Record]) -> None:
        """Take notice of what configs cost; each once."""
        for name, member in self._members.items():
            member_records = [record for record in records if record.schedule == name]
            if member_records:
                member.tuner.tell(member_records)
                member.best_seconds = min(member.best_seconds, *(record.cost for record in member_records))
                member.num_trials += len(member_records)
                member.num_proposed = max(
                    member.num_proposed, member.num_trials
                )  # an earlier session's, or another search's
        valid_records = [record for record in records if record.ok and record.schedule in self._members]
        self._fastest_records = sorted([*self._fastest_records, *valid_records], key=lambda record: record.cost)[
            :NUM_LOCAL_SEARCH_STARTS
        ]

    def ask(self, max_configs: int, *, is_final_phase: bool = False, skip_model: bool = False) -> list[Proposal]:
        """At most `max_configs` configs that were not proposed or learnt before; none when there are no more.

        Args:
            max_configs: how many.
            is_final_phase: whether the search comes to its end, and neighbours of the fastest come first.
            skip_model: whether there is too little time to load the libraries of a tuner's cost model.
        """
        if proposals := self._ask_enqueued(max_configs):
            return proposals  # at once: a tuner takes its time
        if is_final_phase:
            proposals += self._ask_neighbors_of_best(max_configs, skip_model)
        while len(proposals) < max_configs and (allocation := self._allocate_trials(max_configs - len(proposals))):
            for name, num_trials in allocation.items():
                configs = _query_tuner(
                    self._members[name],
                    lambda tuner, num_trials=num_trials: tuner.ask(num_trials, skip_model=skip_model),  # type: ignore[misc]
                )
                self._members[name].is_exhausted = len(configs) < num_trials
                proposals += [(name, config) for config in configs]
        return proposals

    def _ask_enqueued(self, max_configs: int) -> list[Proposal]:
        """Of what is known to be good elsewhere, what is legal and new here; of one portion at a time."""
        proposals: list[Proposal] = []
        while max_configs > 0 and not proposals:
            if not self._enqueued:
                batch = next(self._enqueued_batches, None)
                if batch is None:
                    break
                self._enqueued.extend(batch)
            while self._enqueued and len(proposals) < max_configs:
                name, config = self._enqueued.popleft()
                if (name, config) in self._dequeued:
                    continue
                self._dequeued.append((name, config))
                member = self._members[name]
                claimed_configs = _query_tuner(member, lambda tuner, config=config: _claim_nearest_legal(tuner, config))  # type: ignore[misc]
                new_proposals = [(name, config) for config in claimed_configs]
                member.num_proposed += len(new_proposals)
                proposals += new_proposals
        return proposals

    def _ask_neighbors_of_best(self, max_configs: int, skip_model: bool) -> list[Proposal]:
        proposals: list[Proposal] = []
        for record in self._fastest_records if max_configs > 0 else ():
            num_missing = max_configs - len(proposals)
            neighbors = _query_tuner(
                self._members[record.schedule],
                lambda tuner, config=record.config, num_missing=num_missing: tuner.ask_neighbors(
                    config, num_missing, skip_model=skip_model
                ),  # type: ignore[misc]
            )
            proposals += [(record.schedule, config) for config in neighbors]
        return proposals

    def _allocate_trials(self, num_trials: int) -> dict[str, int]:
        """How many of the next `num_trials` trials each schedule has; none where all spaces are exhausted."""
        eligible = [member for member in self._members.values() if not member.is_exhausted]
        best_seconds = min((member.best_seconds for member in self._members.values()), default=math.inf)
        high_priority = [member for member in eligible if not member.is_low_priority]
        if any(member.is_unexplored for member in high_priority):
            eligible = high_priority  # what the reserve is worth beside them is not known yet
        else:
            eligible = [
                member for member in eligible if not (member.is_low_priority and member.is_unexplored)
            ] or eligible
        allocation: dict[str, int] = {}
        for _ in range(num_trials if eligible else 0):
            member = max(eligible, key=lambda candidate: candidate.allocation_weight(best_seconds))
            member.num_proposed += 1
            allocation[member.schedule.name] = allocation.get(member.schedule.name, 0) + 1
        return allocation


def _query_tuner(member: PortfolioMember, query: Callable[[Tuner], list[Config]]) -> list[Config]:
    """Return the configs that an entrant's tuner answers with; none once the schedule's own code has failed."""
    if member.has_failed:
        return []
    try:
        return query(member.tuner)
    except ScheduleFailure as failure:
        member.has_failed = member.is_exhausted = True
        report_skipped_schedule(failure)
        return []


def _claim_nearest_legal(tuner: Tuner, config: Config) -> list[Config]:
    """Take the legal config that is most like one from elsewhere, if it is new."""
    space = tuner.space
    point = space.project(config)
    legal_points = [point] if space.is_legal(point[None])[0] else space.list_neighbors(point)
    return tuner.claim_points(legal_points, 1)
