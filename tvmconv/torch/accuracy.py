"""The relative L2 error of a result against PyTorch's, and the tolerance for it."""

from __future__ import annotations

import torch

TOLERANCE_FACTOR = 4.0  # of the dtype's tolerance: PyTorch's result errs too, and is rounded between operations


def compute_relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative L2 difference ‖output - expected‖ / ‖expected‖; the absolute one if `expected` is zero."""
    norm = float(expected.double().norm())
    return float((output.double() - expected.double()).norm()) / norm if norm else float(output.double().norm())
