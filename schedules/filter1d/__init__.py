"""Schedules of 1-D filters: the variants of the literature, step by step, then the one that is made to be tuned."""

from . import basic, constant, halo_blocks, halo_two_step, halo_threads  # noqa: F401, I001
from . import caching, shuffle, register  # noqa: F401
