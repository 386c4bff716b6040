"""Convolutions of an input that is upsampled by repeating elements, without work on the repetitions."""

from . import hopper, mma_sync  # noqa: F401
