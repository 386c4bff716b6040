"""Factors of loop extents: how a loop can be cut into nested loops."""

from __future__ import annotations

import functools
import itertools
import math

from tvmconv.arithmetic import round_up

# The longest tile that may overhang its extent. Every length divides a long extent nearly, so that without a bound an
# image row of 100,000 pixels would have millions of ways to be cut; a block of 1,024 threads gains nothing from them.
_LONGEST_OVERHANG = 1024


def prime_factors(n: int) -> list[tuple[int, int]]:
    """The prime factorisation of `n` as (prime, power), by trial division (extents are small)."""
    factors = []
    p = 2
    while p * p <= n:
        power = 0
        while n % p == 0:
            n //= p
            power += 1
        if power:
            factors.append((p, power))
        p += 1
    return factors + ([(n, 1)] if n > 1 else [])


@functools.lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """The divisors of `n`, ascending."""
    powers = ([p**i for i in range(power + 1)] for p, power in prime_factors(n))
    return tuple(sorted(math.prod(chosen) for chosen in itertools.product(*powers)))


def tiles(extent: int, overhang: float) -> list[int]:
    """The lengths of tiles that cover `extent` well, ascending.

    Args:
        extent: the loop's extent.
        overhang: the largest share of the extent that is computed past its end; 0 for the divisors alone.
    """
    longest = min(int(extent * (1 + overhang)), _LONGEST_OVERHANG) if overhang else 0
    loose = (t for t in range(1, longest + 1) if round_up(extent, t) <= extent * (1 + overhang))
    return sorted({*divisors(extent), *loose})


def count_factorisations(n: int, parts: int) -> int:
    """How many ordered lists of `parts` factors have the product `n`: of each prime, its power is dealt out to them."""
    if parts == 0:
        return int(n == 1)
    return math.prod(math.comb(power + parts - 1, parts - 1) for _, power in prime_factors(n))


def factorisations(n: int, parts: int) -> list[tuple[int, ...]]:
    """All ordered lists of `parts` factors whose product is `n`, ascending."""
    if parts == 0:
        return [()] if n == 1 else []
    return [(first, *rest) for first in divisors(n) for rest in factorisations(n // first, parts - 1)]


# The price of a factor's distance from what was asked for (in factors of two), against the price of computing past the
# end (as a share of the extent): halving a factor is worth it when it saves a quarter of the work.
_DISTANCE_PRICE = 0.25


@functools.lru_cache(maxsize=4096)
def nearest_factors(extent: int, preferred: tuple[int, ...], *, exact: bool = False) -> tuple[int, ...]:
    """The legal inner factors nearest to the preferred ones.

    The preferred factors are taken as they are where they divide the extent. Otherwise the result minimises the
    overhang (padded extent / extent - 1) plus the distance from the preferred factors; no factor grows, unless `exact`
    asks for divisors, which may be larger. Of equals, the one with the largest factor before the last wins: a tile's
    threads.
    """
    if extent % math.prod(preferred) == 0:
        return preferred

    def cost(factors: tuple[int, ...]) -> tuple[float, int]:
        tile = math.prod(factors)
        overhang = round_up(extent, tile) / extent - 1
        distance = sum(abs(math.log2(p / f)) for p, f in zip(preferred, factors, strict=True))
        return round(overhang + _DISTANCE_PRICE * distance, 9), -factors[-2] if len(factors) > 1 else 0

    if exact:
        candidates = itertools.product(divisors(extent), repeat=len(preferred))
        return min((c for c in candidates if extent % math.prod(c) == 0), key=cost)
    return min(itertools.product(*(range(p, 0, -1) for p in preferred)), key=cost)
