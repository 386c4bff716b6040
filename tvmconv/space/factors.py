"""Factors of loop extents: how a loop can be cut into nested loops."""

from __future__ import annotations

import functools
import itertools
import math

from tvmconv.arithmetic import round_up

# The longest tile that may overhang its extent. Every length divides a long extent nearly, so that without a bound an
# image row of 100,000 pixels would have millions of ways to be cut; a block of 1,024 threads gains nothing from them.
_MAX_OVERHANGING_TILE = 1024


def factorize(number: int) -> list[tuple[int, int]]:
    """The prime factorisation of `number` as (prime, power), by trial division (extents are small)."""
    factors = []
    p = 2
    while p * p <= number:
        power = 0
        while number % p == 0:
            number //= p
            power += 1
        if power:
            factors.append((p, power))
        p += 1
    return factors + ([(number, 1)] if number > 1 else [])


@functools.lru_cache(maxsize=4096)
def list_divisors(number: int) -> tuple[int, ...]:
    """The divisors of `number`, ascending."""
    powers = ([p**i for i in range(power + 1)] for p, power in factorize(number))
    return tuple(sorted(math.prod(prime_powers) for prime_powers in itertools.product(*powers)))


def list_tile_sizes(extent: int, max_overhang_fraction: float) -> list[int]:
    """The lengths of tiles that cover `extent` well, ascending.

    Args:
        extent: the loop's extent.
        max_overhang_fraction: the largest share of the extent that is computed past its end; 0 for the divisors alone.
    """
    max_size = min(int(extent * (1 + max_overhang_fraction)), _MAX_OVERHANGING_TILE) if max_overhang_fraction else 0
    overhanging_sizes = (
        t for t in range(1, max_size + 1) if round_up(extent, t) <= extent * (1 + max_overhang_fraction)
    )
    return sorted({*list_divisors(extent), *overhanging_sizes})


def count_factorizations(product: int, num_factors: int) -> int:
    """How many ordered lists of `num_factors` factors have the product `product`: of each prime, its power is dealt out
    to them.
    """
    if num_factors == 0:
        return int(product == 1)
    return math.prod(math.comb(power + num_factors - 1, num_factors - 1) for _, power in factorize(product))


def list_factorizations(product: int, num_factors: int) -> list[tuple[int, ...]]:
    """All ordered lists of `num_factors` factors whose product is `product`, ascending."""
    if num_factors == 0:
        return [()] if product == 1 else []
    return [
        (outer_factor, *inner_factors)
        for outer_factor in list_divisors(product)
        for inner_factors in list_factorizations(product // outer_factor, num_factors - 1)
    ]


# The price of a factor's distance from what was asked for (in factors of two), against the price of computing past the
# end (as a share of the extent): halving a factor is worth it when it saves a quarter of the work.
_DISTANCE_WEIGHT = 0.25


@functools.lru_cache(maxsize=4096)
def find_nearest_factors(extent: int, preferred: tuple[int, ...], *, exact_divisors: bool = False) -> tuple[int, ...]:
    """The legal inner factors nearest to the preferred ones.

    The preferred factors are taken as they are where they divide the extent. Otherwise the result minimises the
    overhang (padded extent / extent - 1) plus the distance from the preferred factors; no factor grows, unless
    `exact_divisors` asks for divisors, which may be larger. Of equals, the one with the largest factor before the last
    wins: a tile's threads.
    """
    if extent % math.prod(preferred) == 0:
        return preferred

    def compute_cost(factors: tuple[int, ...]) -> tuple[float, int]:
        tile = math.prod(factors)
        overhang = round_up(extent, tile) / extent - 1
        distance = sum(abs(math.log2(p / f)) for p, f in zip(preferred, factors, strict=True))
        return round(overhang + _DISTANCE_WEIGHT * distance, 9), -factors[-2] if len(factors) > 1 else 0

    if exact_divisors:
        candidates = itertools.product(list_divisors(extent), repeat=len(preferred))
        return min((c for c in candidates if extent % math.prod(c) == 0), key=compute_cost)
    return min(itertools.product(*(range(p, 0, -1) for p in preferred)), key=compute_cost)
