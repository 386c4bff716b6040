"""Tuned convolutions inside PyTorch: `optimize` returns a copy of a model that runs them.

Examples:
    >>> import tvmconv.torch
    >>> optimized = tvmconv.torch.optimize(model, example, seconds=120, log="my.jsonl")  # doctest: +SKIP
    >>> print(optimized.report())  # doctest: +SKIP
    >>> y = optimized(x)  # doctest: +SKIP
"""

from tvmconv.errors import ModelError
from tvmconv.optional_packages import format_install_command

try:
    import torch as _torch
except ImportError as error:
    raise ModelError(f"PyTorch is missing: {format_install_command('torch')}") from error

if tuple(map(int, _torch.__version__.split("+")[0].split(".")[:2])) < (2, 4):
    raise ModelError(f'PyTorch {_torch.__version__} is too old: pip install "torch>=2.4"')

from tvmconv.torch.archive import load
from tvmconv.torch.causal import CausalConv3d
from tvmconv.torch.model import Optimized
from tvmconv.torch.optimize import optimize
from tvmconv.torch.quantize import quantize
from tvmconv.torch.report import Report
from tvmconv.torch.training import get_training_report, tune
from tvmconv.torch.training_report import TrainingReport

__all__ = [
    "CausalConv3d",
    "Optimized",
    "Report",
    "TrainingReport",
    "get_training_report",
    "load",
    "optimize",
    "quantize",
    "tune",
]
