"""Options of the tuner `xgb`, which switch its components."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BayesianTunerOptions:
    """Components of the tuner; docs/ablation.md shows the effect of each.

    Attributes:
        use_gp: Gaussian processes propose configs, by their expected improvement.
        use_trees: Boosted trees propose configs, the members of an ensemble in turn. They also do so without Gaussian
            processes, and when trials of another workload are known.
        local_search: Every second proposal is a neighbour of the best config.
        rank_objective: A Gaussian process learns ranks.
        throughput_objective: A Gaussian process learns relative throughput; with ranks as well, the two take turns.
        power_of_two_features: Gaussian processes have the exponent of two in each number as a feature.
        numeric_equality: Gaussian processes compare numeric knobs for equality, as they do with other knobs.
        challenge_binary_knobs: Every eighth config has the opposite value of a binary knob of the best config, and
            has to improve only on configs with that value.
    """

    use_gp: bool = True
    use_trees: bool = False
    local_search: bool = False
    rank_objective: bool = True
    throughput_objective: bool = True
    power_of_two_features: bool = True
    numeric_equality: bool = False
    challenge_binary_knobs: bool = True
