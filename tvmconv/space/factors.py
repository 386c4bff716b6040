"""Factors of loop extents: the ways to split a loop into nested loops."""

from __future__ import annotations

import functools
import itertools
import math

from tvmconv.arithmetic import round_up

# Maximum length of a tile that may overhang its extent. Nearly every length divides a long extent approximately, so an
# image row of 100,000 pixels would otherwise have millions of splits, of which a block of 1,024 threads has no use.
_MAX_OVERHANGING_TILE = 1024


def factorize(number: int) -> list[tuple[int, int]]:
    """Return the prime factorization of `number` as pairs (prime, power), by trial division (extents are small)."""
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
    """Return the divisors of `number` in ascending order."""
    powers = ([p**i for i in range(power + 1)] for p, power in factorize(number))
    return tuple(sorted(math.prod(prime_powers) for prime_powers in itertools.product(*powers)))


def list_tile_sizes(extent: int, max_overhang_fraction: float) -> list[int]:
    """Return the tile lengths that cover `extent` with little overhang, in ascending order. The overhang is a fraction
    of the extent; 0 stands for divisors only.
    """
    max_size = min(int(extent * (1 + max_overhang_fraction)), _MAX_OVERHANGING_TILE) if max_overhang_fraction else 0
    overhanging_sizes = (
        t for t in range(1, max_size + 1) if round_up(extent, t) <= extent * (1 + max_overhang_fraction)
    )
    return sorted({*list_divisors(extent), *overhanging_sizes})


def count_factorizations(product: int, num_factors: int) -> int:
    """Return the number of ordered lists of `num_factors` factors with the product `product`. Each prime contributes
    the number of ways to distribute its power over the factors.
    """
    if num_factors == 0:
        return int(product == 1)
    return math.prod(math.comb(power + num_factors - 1, num_factors - 1) for _, power in factorize(product))


def list_factorizations(product: int, num_factors: int) -> list[tuple[int, ...]]:
    """Return all ordered lists of `num_factors` factors with the product `product`, in ascending order."""
    if num_factors == 0:
        return [()] if product == 1 else []
    return [
        (outer_factor, *inner_factors)
        for outer_factor in list_divisors(product)
        for inner_factors in list_factorizations(product // outer_factor, num_factors - 1)
    ]


# Weight of a factor's distance from the preferred factor (in factors of two) relative to the overhang (as a fraction of
# the extent): halving a factor must save at least a quarter of the work.
_DISTANCE_WEIGHT = 0.25


@functools.lru_cache(maxsize=4096)
def find_nearest_factors(extent: int, preferred: tuple[int, ...], *, exact_divisors: bool = False) -> tuple[int, ...]:
    """Return the legal inner factors nearest to the preferred ones.

    With `exact_divisors`, the product of the factors divides the extent, and factors may exceed the preferred ones.

    Preferred factors that divide the extent are returned unchanged. Otherwise the result minimizes the overhang (padded
    extent / extent - 1) plus the weighted distance from the preferred factors, and no factor exceeds its preferred
    value. Of equally good results, the one with the largest factor before the last is returned, which is a tile's
    number of threads.

    Examples:
        >>> find_nearest_factors(56, (16, 2))
        (14, 2)
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
