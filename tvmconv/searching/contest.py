"""Several schedules for one workload, searched as one: which config of which of them to measure next."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tvmconv.errors import ScheduleFailure
from tvmconv.knobs import Config
from tvmconv.library import Schedule, report_left_out
from tvmconv.logs.record import Record
from tvmconv.searching.tuners import Tuner

Proposal = tuple[str, Config]  # a schedule's name, and a config of it

SHARPNESS = 8  # a schedule whose best takes 1.2 times as long gets a quarter of the trials
PATIENCE = 3  # failures of a schedule that never succeeded, after which others come first
HOPELESS = 1e-6  # the weight of these
RESERVE = 0.5  # the weight of schedules that seldom win, beside those that mostly do
DESCENDED = 5  # of the fastest configs, whose neighbours are tried in the end


@dataclass
class Entrant:
    """A schedule that takes part.

    Attributes:
        schedule: the schedule.
        tuner: proposes its configs.
        weight: how much it promises before anything is known: 1, or less.
        proposed: how many of its configs were proposed, or learnt if that is more.
        cost: of its fastest config, in seconds a launch.
        exhausted: whether its tuner has no more configs to propose.
        failed: whether its own code raised an exception when it was asked what configs use; no more are proposed then.
    """

    schedule: Schedule
    tuner: Tuner
    weight: float = 1.0
    proposed: int = 0
    cost: float = math.inf
    exhausted: bool = field(default=False, init=False)
    failed: bool = field(default=False, init=False)
    learnt: int = field(default=0, init=False)

    @property
    def in_reserve(self) -> bool:
        """Whether it seldom wins."""
        return self.weight < 1

    @property
    def unknown(self) -> bool:
        """Whether nothing can be said of it yet."""
        return not math.isfinite(self.cost) and self.learnt < PATIENCE

    def claim(self, best: float) -> float:
        """Its claim to the next trial, where `best` is the fastest of all: its weight over what it had already."""
        weight = self.weight
        if math.isfinite(self.cost):
            weight *= (best / self.cost) ** SHARPNESS
        elif not self.unknown:
            weight *= HOPELESS
        return weight / (self.proposed + 1)


class Contest:
    """One search over several schedules.

    What is known to be good comes first: the schedules' defaults, and configs that were fast elsewhere. Then trials go
    to the schedules by how fast their best is, each chosen by the schedule's own tuner; in the end, to the whole
    neighbourhoods of the fastest configs.

    Args:
        entrants: the schedules, those that promise most first.
        known: configs to measure first, by schedule, in the order of their promise; in portions, each of which is asked
            for only when all before it were proposed.
    """

    def __init__(self, entrants: Sequence[Entrant], known: Iterable[Iterable[Proposal]] = ()) -> None:
        self._entrants: Mapping[str, Entrant] = {entrant.schedule.name: entrant for entrant in entrants}
        self._portions = iter(known)
        self._known: deque[Proposal] = deque()  # what is left of the present portion
        self._seen: list[Proposal] = []
        self._fastest: list[Record] = []

    @property
    def batch(self) -> int:
        """How many configs the tuners like to propose before they learn what they cost."""
        return sum(entrant.tuner.batch for entrant in self._entrants.values() if not entrant.in_reserve)

    def learn(self, records: Sequence[Record]) -> None:
        """Take notice of what configs cost; each once."""
        for name, entrant in self._entrants.items():
            own = [record for record in records if record.schedule == name]
            if own:
                entrant.tuner.learn(own)
                entrant.cost = min(entrant.cost, *(record.cost for record in own))
                entrant.learnt += len(own)
                entrant.proposed = max(entrant.proposed, entrant.learnt)  # an earlier session's, or another search's
        good = [record for record in records if record.ok and record.schedule in self._entrants]
        self._fastest = sorted([*self._fastest, *good], key=lambda record: record.cost)[:DESCENDED]

    def propose(self, n: int, *, last: bool = False, quick: bool = False) -> list[Proposal]:
        """At most `n` configs that were not proposed or learnt before; none when there are no more.

        Args:
            n: how many.
            last: whether the search comes to its end, and neighbours of the fastest come first.
            quick: whether there is too little time to load the libraries of a tuner's cost model.
        """
        if chosen := self._from_known(n):
            return chosen  # at once: a tuner takes its time
        if last:
            chosen += self._near_the_fastest(n, quick)
        while len(chosen) < n and (shares := self._shares(n - len(chosen))):
            for name, share in shares.items():
                configs = _ask(
                    self._entrants[name],
                    lambda tuner, share=share: tuner.propose(share, quick=quick),  # type: ignore[misc]
                )
                self._entrants[name].exhausted = len(configs) < share
                chosen += [(name, config) for config in configs]
        return chosen

    def _from_known(self, n: int) -> list[Proposal]:
        """Of what is known to be good elsewhere, what is legal and new here; of one portion at a time."""
        chosen: list[Proposal] = []
        while n > 0 and not chosen:
            if not self._known:
                portion = next(self._portions, None)
                if portion is None:
                    break
                self._known.extend(portion)
            while self._known and len(chosen) < n:
                name, config = self._known.popleft()
                if (name, config) in self._seen:
                    continue
                self._seen.append((name, config))
                entrant = self._entrants[name]
                nearest = _ask(entrant, lambda tuner, config=config: _take_nearest(tuner, config))  # type: ignore[misc]
                taken = [(name, config) for config in nearest]
                entrant.proposed += len(taken)
                chosen += taken
        return chosen

    def _near_the_fastest(self, n: int, quick: bool) -> list[Proposal]:
        chosen: list[Proposal] = []
        for record in self._fastest if n > 0 else ():
            wanted = n - len(chosen)
            near = _ask(
                self._entrants[record.schedule],
                lambda tuner, config=record.config, wanted=wanted: tuner.take_near(config, wanted, quick=quick),  # type: ignore[misc]
            )
            chosen += [(record.schedule, config) for config in near]
        return chosen

    def _shares(self, n: int) -> dict[str, int]:
        """How many of the next `n` trials each schedule has; none where all spaces are exhausted."""
        able = [entrant for entrant in self._entrants.values() if not entrant.exhausted]
        best = min((entrant.cost for entrant in self._entrants.values()), default=math.inf)
        first = [entrant for entrant in able if not entrant.in_reserve]
        if any(entrant.unknown for entrant in first):
            able = first  # what the reserve is worth beside them is not known yet
        else:
            able = [entrant for entrant in able if not (entrant.in_reserve and entrant.unknown)] or able
        shares: dict[str, int] = {}
        for _ in range(n if able else 0):
            entrant = max(able, key=lambda each: each.claim(best))
            entrant.proposed += 1
            shares[entrant.schedule.name] = shares.get(entrant.schedule.name, 0) + 1
        return shares


def _ask(entrant: Entrant, question: Callable[[Tuner], list[Config]]) -> list[Config]:
    """Return the configs that an entrant's tuner answers with; none once the schedule's own code has failed."""
    if entrant.failed:
        return []
    try:
        return question(entrant.tuner)
    except ScheduleFailure as failure:
        entrant.failed = entrant.exhausted = True
        report_left_out(failure)
        return []


def _take_nearest(tuner: Tuner, config: Config) -> list[Config]:
    """Take the legal config that is most like one from elsewhere, if it is new."""
    space = tuner.space
    point = space.nearest(config)
    legal = [point] if space.legal(point[None])[0] else space.neighbours(point)
    return tuner.take(legal, 1)
