"""Schedules of 1-D and 2-D filters: one optimization from the literature at a time, then one made for tuning."""

from . import basic, constant, halo_blocks, halo_two_step, halo_threads, halo_strided  # noqa: F401, I001
from . import caching, shuffle, texture, register  # noqa: F401
