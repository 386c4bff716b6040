"""Gradients as matrix products on the FMA units (CUTLASS's OpClassSimt), for float32."""

from . import dgrad, wgrad  # noqa: F401
