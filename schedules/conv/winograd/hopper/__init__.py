"""Winograd's algorithm on Hopper: `hopper` multiplies the transformed operands as a grouped matrix product."""

from . import schedule  # noqa: F401
