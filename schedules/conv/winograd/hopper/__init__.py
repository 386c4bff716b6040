"""Winograd's algorithm on Hopper: `hopper` multiplies the transformed operands, all places as groups of one product."""

from . import schedule  # noqa: F401
