"""Analysis and rewriting of generated CUDA and OpenCL source."""

from __future__ import annotations

import re
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.errors import CompileError
from tvmconv.tensor_map import MAP_ALIGNMENT_BYTES as MAP_ALIGNMENT
from tvmconv.tensor_map import MAP_BYTES as MAP_BYTES
from tvmconv.tensor_map import TensorMap

# Names of dtypes in TVM's code generators.
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
    """A parameter of a device function: a pointer, or a tensor map over the buffer."""

    name: str  # name in the source
    dtype: str  # dtype of the elements in the function, which may replace a dtype that the device does not support
    index: int  # buffer index in the arrays and workspace of the executable
    tensor_map: TensorMap | None = None  # tensor map over the buffer; None for its address


def get_type_name(dtype: str, target_kind: str) -> str:
    """Return the name of a dtype in the source of a target; raises `CompileError` if it has none."""
    try:
        return _TYPE_NAMES[target_kind][dtype]
    except KeyError:
        raise CompileError(f"{dtype} has no name in {target_kind} text") from None


def format_declaration(parameter: KernelParameter, target_kind: str) -> str:
    """Return the declaration of a parameter in the source of a target."""
    return _POINTER_FORMAT[target_kind].format(get_type_name(parameter.dtype, target_kind), parameter.name)


@dataclass(frozen=True)
class KernelTextSpan:
    """Spans of characters of a kernel's parameter lists, in all declarations, and of its body."""

    parameter_spans: tuple[tuple[int, int], ...]
    body_span: tuple[int, int]


_KERNEL_HEAD = {"cuda": r'extern "C" __global__ void [^;{]*?\b', "opencl": r"__kernel void "}


def find_kernel(source: str, name: str, target_kind: str) -> KernelTextSpan:
    """Return the position of a kernel in a source; raises `CompileError` if it is not defined exactly once."""
    head = _KERNEL_HEAD[target_kind]
    declarations = list(re.finditer(rf"{head}{name}\(([^)]*)\)(\s*{{)?", source))
    bodies = [match.end(1) for match in declarations if match[2]]
    if len(bodies) != 1:
        raise CompileError(f"the generated text does not define the kernel {name} exactly once")
    next_kernel = re.compile(head).search(source, bodies[0])
    stop = next_kernel.start() if next_kernel else len(source)
    return KernelTextSpan(tuple(match.span(1) for match in declarations), (bodies[0], stop))


def strip_preamble(source: str) -> str:
    """Return the kernels of a source without the preceding definitions of TVM."""
    first = re.search(r'^(// Function: |__constant__ |extern "C" __global__ |__kernel )', source, re.MULTILINE)
    return source[first.start() :] if first else source


_ALIGNMENT_BYTES = 64

# `__shared__ alignas(64) float K_shared_ptr[51];` with scalars or short vectors such as `float4`
_ELEMENT_PATTERN = "|".join((*_TYPE_NAMES["cuda"].values(), "longlong", "ulonglong"))
_SHARED_ARRAY = re.compile(rf"(__shared__ alignas\({_ALIGNMENT_BYTES}\) ({_ELEMENT_PATTERN})(\d?) \w+\[)(\d+)(?=\];)")
_ITEMSIZE = {name: np.dtype(dtype).itemsize for dtype, name in _TYPE_NAMES["cuda"].items()}
_ITEMSIZE |= {"longlong": 8, "ulonglong": 8}


def pad_shared_arrays(source: str) -> str:
    """Round the sizes of shared arrays in a CUDA source up to their alignment.

    NVIDIA's compiler may load the last words of an array together with the padding after them. This is harmless, but
    compute-sanitizer reports an access out of bounds for the last array.
    """

    def pad_array(match: re.Match[str]) -> str:
        itemsize = _ITEMSIZE[match[2]] * int(match[3] or 1)
        return f"{match[1]}{ceil_div(round_up(int(match[4]) * itemsize, _ALIGNMENT_BYTES), itemsize)}"

    return _SHARED_ARRAY.sub(pad_array, source)


_TENSOR_MAP = "CUtensorMap"


def declare_tensor_maps(source: str) -> str:
    """Declare the type of tensor maps in a CUDA source, because NVRTC does not have its header cuda.h."""
    if _TENSOR_MAP not in source:
        return source
    struct = f"struct alignas({MAP_ALIGNMENT}) {_TENSOR_MAP} {{ unsigned long long opaque[{MAP_BYTES // 8}]; }};"
    return f"#ifdef __CUDACC_RTC__\n{struct}\n#endif\n{source}"


def uses_grid_dependency_wait(source: str, name: str) -> bool:
    """Return whether a kernel of a CUDA source executes griddepcontrol.wait.

    Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
    """
    start, stop = find_kernel(source, name, "cuda").body_span
    return re.search(r"griddepcontrol[._]wait", source[start:stop]) is not None


def declare_cluster(source: str, name: str, cluster: tuple[int, int, int]) -> str:
    """Fix the cluster size of a kernel in its CUDA source, which TVM leaves to the launch.

    Source: CUDA C++ Programming Guide, "Thread Block Clusters".
    """
    if cluster == (1, 1, 1):
        return source
    head, extents = 'extern "C" __global__ void', ", ".join(map(str, cluster))
    return re.sub(rf"{head} (?=[^;{{]*?\b{name}\()", f"{head} __cluster_dims__({extents}) ", source)


# TVM's vector of four 16-bit floats: a class with four members, which is copied member by member.
_HALF4_TYPE = "half4_bfloat164"
_LAST_CONSTRUCTOR = re.compile(rf"^( *)__host__ __device__ {_HALF4_TYPE}\(T x, T y, T z, T w\) .*\n", re.MULTILINE)
_HALF4_COPY_METHODS = (
    f"__host__ __device__ {_HALF4_TYPE}(const {_HALF4_TYPE}& from) {{ *(uint2*)this = *(const uint2*)&from; }}",
    f"__host__ __device__ {_HALF4_TYPE}& operator=(const {_HALF4_TYPE}& from) "
    "{ *(uint2*)this = *(const uint2*)&from; return *this; }",
)


def vectorize_half4_copies(source: str) -> str:
    """Copy vectors of four 16-bit floats in a CUDA source as eight bytes.

    Copying member by member places each element in its own register. For conditional loads, NVIDIA's compiler then adds
    instructions to pack and unpack every element, as many as there are multiply-adds.
    """
    return _LAST_CONSTRUCTOR.sub(
        lambda match: match[0] + "".join(f"{match[1]}{line}\n" for line in _HALF4_COPY_METHODS), source, 1
    )


def define_dot_products(source: str, target_kind: str) -> str:
    """Define the function `__dp4a` of CUDA in an OpenCL source that calls it."""
    return f"{_DOT_PRODUCT}\n{source}" if target_kind == "opencl" and "__dp4a(" in source else source


_DOT_PRODUCT = """inline int __dp4a(char4 a, char4 b, int sum) {
  return sum + (int)a.x * (int)b.x + (int)a.y * (int)b.y + (int)a.z * (int)b.z + (int)a.w * (int)b.w;
}"""


def declare_one_block_per_multiprocessor(source: str, name: str) -> str:
    """Add a minimum of one block per multiprocessor to the launch bounds of a kernel that moves registers.

    ptxas ignores setmaxnreg unless the registers per thread at the launch follow from the launch bounds.
    """
    if "setmaxnreg" not in source:
        return source
    start, stop = find_kernel(source, name, "cuda").body_span
    if "setmaxnreg" not in source[start:stop]:
        return source
    return re.sub(rf"(__launch_bounds__\(\d+)(?=\) {name}\()", r"\1, 1", source)


_GUARDED_LOAD = re.compile(
    r"if \((?P<guard>.*)\) \{\n *(?P<value>condval\w*) = (?P<array>\w+)\[(?P<index>.*)\];\n *\} else \{\n"
    r" *(?P=value) = (?P<other>.*);\n *\}"
)


_PRIVATE_ARRAY = re.compile(r"^( +)\w+ (?P<name>\w+)\[(?P<size>\d+)\];$", re.MULTILINE)


def adapt_to_cpu(source: str) -> str:
    """Return an OpenCL source that PoCL compiles for a CPU correctly and in a fraction of the time.

    PoCL turns a work-group into loops with 64-bit counters, the ids of the work-items. TVM converts these ids to 32
    bits. For every address, LLVM then tries to prove that no 32-bit sum overflows (LoopStrengthReduce), which can take
    ten times as long as all other passes. The ids therefore stay 64-bit integers. A load with a guard, such as that of
    a padded input, becomes a load of a valid element, because LLVM vectorizes the guard into a branch for each
    work-item.

    A work-item outside of the output may compute with elements of private arrays that it has not loaded, and stores no
    result. LLVM concludes from such a value in a call that the guard of the load holds, and removes the guard of the
    store as well. Private arrays therefore start as zeros, by a loop, because PoCL compiles initializers wrongly.
    """
    source = source.replace("convert_int(get_local_id(", "convert_long(get_local_id(")
    zeros = r"\n\1for (int i = 0; i < \g<size>; ++i) \g<name>[i] = 0;"
    source = _PRIVATE_ARRAY.sub(rf"\g<0>{zeros}", source)
    return _GUARDED_LOAD.sub(
        r"{ bool guard = \g<guard>; \g<value> = \g<array>[guard ? (\g<index>) : 0]; "
        r"\g<value> = guard ? \g<value> : \g<other>; }",
        source,
    )
