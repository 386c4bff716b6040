"""Data types of workloads: how elements are stored and multiplied, and which error a correct result may have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from numpy.typing import NDArray

ACCUMULATOR = "float32"  # type of all sums, because a 16-bit sum would lose digits with every tap
INT8_DEVIATION = 48  # standard deviation of random integers; the largest are clipped
SUM_TOLERANCE = 1e-5  # relative L2 error; float32 sums of 5,000 products err by about 5e-7


@dataclass(frozen=True)
class Dtype:
    """A data type in which a workload is computed. The unit roundoff is 2^-p for p bits of precision, the leading bit
    included: the larger one of an element before it is multiplied and of a result as it is stored.
    """

    name: str  # value of `Workload.dtype`
    text: str  # name in a workload's text
    storage: str  # element type of the tensors in memory
    unit_roundoff: float
    ptx: str  # name as an operand of PTX's matrix instructions
    accumulator: str = ACCUMULATOR  # type of the sums of products

    @property
    def has_8_bits(self) -> bool:
        """Whether elements have 8 bits; results then have a type of their own, and operands are exact."""
        return self.itemsize == 1

    @property
    def itemsize(self) -> int:
        """Bytes per element in memory."""
        return get_itemsize(self.storage)

    @property
    def tolerance(self) -> float:
        """Largest relative L2 error of a correct result against float64 on the rounded inputs. A store rounds each
        element by at most `unit_roundoff`, and by less on average. The product of two operands that are truncated
        instead of rounded errs by up to four times as much. A wrong kernel errs by far more.
        """
        return SUM_TOLERANCE + 4 * self.unit_roundoff


FLOAT32 = Dtype("float32", "f32", "float32", 0.0, "f32")
TF32 = Dtype("tf32", "tf32", "float32", 2.0**-11, "tf32")  # 10 bits of mantissa: NVIDIA A100 whitepaper
FLOAT16 = Dtype("float16", "f16", "float16", 2.0**-11, "f16")
BFLOAT16 = Dtype("bfloat16", "bf16", "bfloat16", 2.0**-8, "bf16")
# 8-bit floats: Micikevicius et al., "FP8 Formats for Deep Learning", 2022. E4M3 has no infinity.
FLOAT8_E4M3 = Dtype("float8_e4m3fn", "e4m3", "float8_e4m3fn", 2.0**-4, "e4m3")
FLOAT8_E5M2 = Dtype("float8_e5m2", "e5m2", "float8_e5m2", 2.0**-3, "e5m2")
INT8 = Dtype("int8", "i8", "int8", 0.0, "s8", accumulator="int32")

DTYPES = {dtype.name: dtype for dtype in (FLOAT32, TF32, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, INT8)}
FLOAT8_DTYPES = (FLOAT8_E4M3.name, FLOAT8_E5M2.name)
EIGHT_BIT_DTYPES = (*FLOAT8_DTYPES, INT8.name)
DTYPES_BY_TEXT = {dtype.text: dtype for dtype in DTYPES.values()}
# Dtypes of models and their convolutions in PyTorch, by text.
MODEL_DTYPES_BY_TEXT = {text: dtype for text, dtype in DTYPES_BY_TEXT.items() if dtype.name not in EIGHT_BIT_DTYPES}

# Mean relative loss of numbers of Benford's law that tensor cores truncate to 10 bits of mantissa.
MEAN_TRUNCATION_LOSS = 2.0**-11 / (2 * math.log(2))


def round_operand(name: str, array: NDArray[np.float32]) -> NDArray[Any]:
    """Round finite numbers to an operand's data type, to nearest even. Elements of TF32 are stored as float32 with the
    lower 13 of the 23 bits of their mantissa set to zero. Numbers of standard deviation 1 become integers of standard
    deviation `INT8_DEVIATION`.
    """
    if name == INT8.name:
        return np.clip(np.rint(array * np.float32(INT8_DEVIATION)), -128, 127).astype(np.int8)
    if name not in (TF32.name, BFLOAT16.name):
        return array.astype(get_numpy_dtype(DTYPES[name].storage), copy=False)
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    if name == BFLOAT16.name:  # same result as `astype`, which would hold the GIL
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(get_numpy_dtype("bfloat16"))
    return ((bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)).view(np.float32)


def widen_to_float64(array: NDArray[Any]) -> NDArray[np.float64]:
    """Return a C-contiguous copy of an array in float64."""
    if array.dtype.name != "bfloat16":
        return array.astype(np.float64, order="C")
    bits = array.view(np.uint16).astype(np.uint32, order="C")  # `astype` of ml_dtypes would hold the GIL
    return (bits << 16).view(np.float32).astype(np.float64)


def validate_dtype(name: object) -> Dtype:
    """Return the data type of a name; raise WorkloadError if there is none."""
    if not isinstance(name, str) or name not in DTYPES:
        raise WorkloadError(f"dtype={quote(name)}: expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def get_numpy_dtype(name: str) -> np.dtype:
    """Return NumPy's dtype of an element type; bfloat16 and 8-bit floats are those of ml_dtypes."""
    if name == "bfloat16" or name in FLOAT8_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def get_tir_dtype(name: str) -> str:
    """Return the dtype of an element type in TIR, where 8-bit floats are bits: TVM 0.27 converts them wrongly."""
    return "uint8" if name in FLOAT8_DTYPES else name


def get_itemsize(name: str) -> int:
    """Return the bytes of an element of a storage dtype."""
    return get_numpy_dtype(name).itemsize
