"""Schedules of 1-D and 2-D filters: the variants of the literature, step by step, then the one made to be tuned."""

from . import basic, constant, halo_blocks, halo_two_step, halo_threads, halo_strided  # noqa: F401, I001
from . import caching, shuffle, texture, register  # noqa: F401
