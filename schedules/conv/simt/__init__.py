"""Gradients of weights as matrix products on the FMA units (CUTLASS's OpClassSimt), for float32."""

from . import wgrad  # noqa: F401
