"""What the tuner `xgb` is made of, to be switched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BayesianTunerOptions:
    """Parts of the tuner; docs/ablation.md has what each is worth.

    Attributes:
        use_gp: Gaussian processes choose, by the improvement that they expect.
        use_trees: boosted trees choose, each member of an ensemble in its turn; without a process, or where another
            workload's trials are known, they do anyway.
        local_search: every second proposal is a neighbour of the best config.
        rank_objective: a process learns ranks.
        throughput_objective: a process learns shares of the speed; with ranks as well, the two take turns.
        power_of_two_features: processes see how often two divides a number.
        numeric_equality: processes see which numbers are equal, as they do of other knobs.
        challenge_binary_knobs: each eighth config is to improve on those with the other option of a knob of two.
    """

    use_gp: bool = True
    use_trees: bool = False
    local_search: bool = False
    rank_objective: bool = True
    throughput_objective: bool = True
    power_of_two_features: bool = True
    numeric_equality: bool = False
    challenge_binary_knobs: bool = True
