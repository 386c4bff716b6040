"""Schedules of 2-D filters: the variants of the literature, step by step, then the one that is made to be tuned."""

from . import basic, constant, halo_threads, halo_strided  # noqa: F401, I001
from . import caching, shuffle, texture, register  # noqa: F401
