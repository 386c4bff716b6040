"""Generated CUDA and OpenCL text: what its types are called, where its kernels are, how shared arrays are aligned."""

from __future__ import annotations

import re
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  lets NumPy know bfloat16 by its name
import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.errors import CompileError
from tvmconv.tensor_map import MAP_ALIGNMENT_BYTES as MAP_ALIGNMENT
from tvmconv.tensor_map import MAP_BYTES as MAP_BYTES
from tvmconv.tensor_map import TensorMap

# What TVM's code generators call a dtype; those of other names are not placed.
_COMMON_TYPE_NAMES = {"float32": "float", "float16": "half", "float64": "double", "int32": "int", "int16": "short"}
_COMMON_TYPE_NAMES |= {"uint8": "uchar", "uint16": "ushort", "uint32": "uint", "bool": "bool"}
_TYPE_NAMES = {
    "cuda": {
        **_COMMON_TYPE_NAMES,
        "bfloat16": "nv_bfloat16",
        "int8": "signed char",
        "int64": "int64_t",
        "uint64": "uint64_t",
    },
    "opencl": {**_COMMON_TYPE_NAMES, "int8": "char", "int64": "long", "uint64": "ulong"},
}
_POINTER_FORMAT = {"cuda": "{}* __restrict__ {}", "opencl": "__global {}* restrict {}"}


@dataclass(frozen=True)
class KernelParameter:
    """A pointer that a device function takes, or a tensor map.

    Attributes:
        name: in the text.
        dtype: of what it points to, as the function has it: a dtype that the device lacks is another one there.
        index: of the program's array or scratch memory that goes there.
        tensor_map: the map over that which goes there; None for its address.
    """

    name: str
    dtype: str
    index: int
    tensor_map: TensorMap | None = None


def get_type_name(dtype: str, target_kind: str) -> str:
    """What a dtype is called in the text of a target; raises `CompileError` for one that has no name there."""
    try:
        return _TYPE_NAMES[target_kind][dtype]
    except KeyError:
        raise CompileError(f"{dtype} has no name in {target_kind} text") from None


def format_declaration(parameter: KernelParameter, target_kind: str) -> str:
    """How the text of a target declares a parameter."""
    return _POINTER_FORMAT[target_kind].format(get_type_name(parameter.dtype, target_kind), parameter.name)


@dataclass(frozen=True)
class KernelTextSpan:
    """Where a kernel is in a text, as spans of characters.

    Attributes:
        parameter_spans: the parameters, wherever the kernel is declared or defined.
        body_span: what follows the parameters of its definition.
    """

    parameter_spans: tuple[tuple[int, int], ...]
    body_span: tuple[int, int]


_KERNEL_HEAD = {"cuda": r'extern "C" __global__ void [^;{]*?\b', "opencl": r"__kernel void "}


def find_kernel(source: str, name: str, target_kind: str) -> KernelTextSpan:
    """Find a kernel in a text; raises `CompileError` where it is not defined exactly once."""
    head = _KERNEL_HEAD[target_kind]
    declarations = list(re.finditer(rf"{head}{name}\(([^)]*)\)(\s*{{)?", source))
    bodies = [match.end(1) for match in declarations if match[2]]
    if len(bodies) != 1:
        raise CompileError(f"the generated text does not define the kernel {name} exactly once")
    next_kernel = re.compile(head).search(source, bodies[0])
    return KernelTextSpan(
        tuple(match.span(1) for match in declarations), (bodies[0], next_kernel.start() if next_kernel else len(source))
    )


def strip_preamble(source: str) -> str:
    """The kernels of a text alone, without the definitions that TVM puts before them."""
    first = re.search(r'^(// Function: |__constant__ |extern "C" __global__ |__kernel )', source, re.MULTILINE)
    return source[first.start() :] if first else source


_ALIGNMENT_BYTES = 64

# `__shared__ alignas(64) float K_shared_ptr[51];`, of scalars or of short vectors such as `float4`
_ELEMENT_PATTERN = "|".join((*_TYPE_NAMES["cuda"].values(), "longlong", "ulonglong"))
_SHARED_ARRAY = re.compile(rf"(__shared__ alignas\({_ALIGNMENT_BYTES}\) ({_ELEMENT_PATTERN})(\d?) \w+\[)(\d+)(?=\];)")
_ITEMSIZE = {name: np.dtype(dtype).itemsize for dtype, name in _TYPE_NAMES["cuda"].items()} | {
    "longlong": 8,
    "ulonglong": 8,
}


def pad_shared_arrays(source: str) -> str:
    """Round the shared arrays of a CUDA text up to their alignment.

    NVIDIA's compiler may load an array's last words together with what follows them inside the alignment. That harms
    nothing, but behind the last array compute-sanitizer calls it an access out of bounds.
    """

    def pad_array(match: re.Match[str]) -> str:
        itemsize = _ITEMSIZE[match[2]] * int(match[3] or 1)
        return f"{match[1]}{ceil_div(_round_up_to_alignment(int(match[4]) * itemsize), itemsize)}"

    return _SHARED_ARRAY.sub(pad_array, source)


def _round_up_to_alignment(nbytes: int) -> int:
    return round_up(nbytes, _ALIGNMENT_BYTES)


_TENSOR_MAP = "CUtensorMap"


def declare_tensor_maps(source: str) -> str:
    """Let NVRTC know the type of a CUDA text's tensor maps, which is in a header that NVRTC does not have (cuda.h)."""
    if _TENSOR_MAP not in source:
        return source
    struct = f"struct alignas({MAP_ALIGNMENT}) {_TENSOR_MAP} {{ unsigned long long opaque[{MAP_BYTES // 8}]; }};"
    return f"#ifdef __CUDACC_RTC__\n{struct}\n#endif\n{source}"


def uses_grid_dependency_wait(source: str, name: str) -> bool:
    """Whether a kernel of a CUDA text executes griddepcontrol.wait.

    Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
    """
    start, stop = find_kernel(source, name, "cuda").body_span
    return re.search(r"griddepcontrol[._]wait", source[start:stop]) is not None


def declare_cluster(source: str, name: str, cluster: tuple[int, int, int]) -> str:
    """Fix the blocks of a kernel's clusters in its CUDA text: TVM leaves them to whoever launches.

    Source: CUDA C++ Programming Guide, "Thread Block Clusters".
    """
    if cluster == (1, 1, 1):
        return source
    extents = ", ".join(map(str, cluster))
    return re.sub(
        rf'extern "C" __global__ void (?=[^;{{]*?\b{name}\()',
        f'extern "C" __global__ void __cluster_dims__({extents}) ',
        source,
    )


# TVM's vector of four 16-bit floats, in its preamble: a class of four members, which is copied member by member.
_HALF4_TYPE = "half4_bfloat164"
_LAST_CONSTRUCTOR = re.compile(rf"^( *)__host__ __device__ {_HALF4_TYPE}\(T x, T y, T z, T w\) .*\n", re.MULTILINE)
_HALF4_COPY_METHODS = (
    f"__host__ __device__ {_HALF4_TYPE}(const {_HALF4_TYPE}& from) {{ *(uint2*)this = *(const uint2*)&from; }}",
    f"__host__ __device__ {_HALF4_TYPE}& operator=(const {_HALF4_TYPE}& from) "
    "{ *(uint2*)this = *(const uint2*)&from; return *this; }",
)


def vectorize_half4_copies(source: str) -> str:
    """Copy vectors of four 16-bit floats in a CUDA text as eight bytes.

    Copied one by one, the four elements become registers of their own, and where an element is loaded on a condition
    NVIDIA's compiler puts them together and takes them apart again: an instruction for each, as many as there are
    products.
    """
    return _LAST_CONSTRUCTOR.sub(
        lambda match: match[0] + "".join(f"{match[1]}{line}\n" for line in _HALF4_COPY_METHODS), source, 1
    )
