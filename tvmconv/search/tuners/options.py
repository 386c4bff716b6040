"""Options of the tuner `xgb`, which switch its components."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BayesianTunerOptions:
    """Components of the tuner; docs/ablation.md shows the effect of each."""

    use_gp: bool = True  # gaussian processes propose configs, by their expected improvement
    # Boosted trees propose configs, the members of an ensemble in turn. They also do so without Gaussian processes, and
    # when trials of another workload are known.
    use_trees: bool = False
    local_search: bool = False  # every second proposal is a neighbour of the best config
    rank_objective: bool = True  # a Gaussian process learns ranks
    # A Gaussian process learns relative throughput; with ranks as well, the two take turns.
    throughput_objective: bool = True
    power_of_two_features: bool = True  # gaussian processes have the exponent of two in each number as a feature
    numeric_equality: bool = False  # gaussian processes compare numeric knobs for equality, as they do with other knobs
    # Every eighth config has the opposite value of a binary knob of the best config, and has to improve only on configs
    # with that value.
    challenge_binary_knobs: bool = True
