"""Random search, which draws legal configs uniformly."""

from tvmconv.search.tuners.base import Tuner


class RandomTuner(Tuner):
    """Random search, the reference for the other tuners."""
