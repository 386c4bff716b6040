"""Random search: every legal config is as likely as any other."""

from tvmconv.search.tuners.base import Tuner


class RandomTuner(Tuner):
    """Proposes configs uniformly at random; the yardstick of the others."""
