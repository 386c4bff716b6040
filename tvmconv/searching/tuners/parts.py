"""What the tuner `xgb` is made of, to be switched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parts:
    """Parts of the tuner; docs/ablation.md has what each is worth.

    Attributes:
        process: Gaussian processes choose, by the improvement that they expect.
        trees: boosted trees choose, each member of an ensemble in its turn; without a process, or where another
            workload's trials are known, they do anyway.
        near: every second proposal is a neighbour of the best config.
        ranks: a process learns ranks.
        shares: a process learns shares of the speed; with ranks as well, the two take turns.
        twos: processes see how often two divides a number.
        numbers: processes see which numbers are equal, as they do of other knobs.
        rivals: each eighth config is to improve on those with the other option of a knob of two.
    """

    process: bool = True
    trees: bool = False
    near: bool = False
    ranks: bool = True
    shares: bool = True
    twos: bool = True
    numbers: bool = False
    rivals: bool = True
