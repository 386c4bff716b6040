"""The options of a quantization: the 8-bit dtype, the inputs for calibration, the observer, and the error limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from tvmconv.errors import ModelError
from tvmconv.torch.observers import OBSERVERS, ObserverName
from tvmconv.workloads.dtypes import DTYPES_BY_TEXT, FLOAT8_E4M3, INT8, Dtype

QUANTIZED_DTYPES = (FLOAT8_E4M3.text, INT8.text)
# Operands in e4m3 alone cause errors of about 0.04. A layer beyond this bound is unusual: few values are large.
DEFAULT_MAX_ERROR = 0.1


@dataclass(frozen=True)
class QuantizationOptions:
    """The type of quantized layers, and how their scales are found.

    Args:
        dtype: Type of the operands.
        batches: Arguments of the model for calibration, one tuple per call.
        observer: Observer of activations, of `tvmconv.torch.observers`.
        max_error: Largest relative L2 error of the output of a quantized layer.
    """

    dtype: Dtype
    batches: Sequence[tuple[Any, ...]]
    observer: ObserverName = "mse"
    max_error: float = DEFAULT_MAX_ERROR

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the operands in PyTorch."""
        result: torch.dtype = getattr(torch, self.dtype.storage)
        return result


def make_quantization_options(
    dtype: str, calibrate: Iterable[Any] | None, observer: str, max_error: float
) -> QuantizationOptions:
    """Return checked options; raise ModelError for invalid ones."""
    if dtype not in QUANTIZED_DTYPES:
        raise ModelError(f"dtype={dtype!r}: expected one of {', '.join(QUANTIZED_DTYPES)}")
    if observer not in OBSERVERS:
        raise ModelError(f"observer={observer!r}: expected one of {', '.join(OBSERVERS)}")
    if not isinstance(max_error, (int, float)) or not max_error > 0:
        raise ModelError(f"max_layer_error={max_error!r}: expected a positive number")
    if isinstance(calibrate, torch.Tensor) or not isinstance(calibrate, Iterable):
        type_name = type(calibrate).__name__
        raise ModelError(f"calibrate: expected a list of inputs of the model for dtype={dtype!r}, not {type_name}")
    batches = [batch if isinstance(batch, tuple) else (batch,) for batch in calibrate]
    if not batches:
        raise ModelError("calibrate: expected at least one input of the model")
    return QuantizationOptions(DTYPES_BY_TEXT[dtype], batches, cast(ObserverName, observer), max_error)
