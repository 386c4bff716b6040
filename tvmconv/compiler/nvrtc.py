"""Compilation of CUDA source to cubin or PTX with NVRTC, which needs no GPU.

TVM's own NVRTC call takes over a second per kernel, mostly for parsing the `<cuda/std/...>` headers that the source
includes for integer type names. This module first compiles with short in-memory replacements of those headers. Only a
source that needs more of them is compiled again with the real headers. The options are those of `tvm.support.nvcc`, so
the generated instructions are the same.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from tvmconv.errors import CompileError
from tvmconv.optional_packages import format_install_command

# `-default-device` to `--use_fast_math` and the register level are as in tvm.support.nvcc; `-v` reports resources.
# Warnings are disabled because TVM's generated code declares unused variables.
_OPTIONS = (
    "-default-device",
    "--device-int128",
    "--use_fast_math",
    "--ptxas-options=-v",
    "--ptxas-options=--register-usage-level=10",
    "--disable-warnings",
)

# Declarations that the preamble of TVM's source uses (tvm/backend/cuda/codegen/header.py). All other names are
# undeclared or incomplete, so that their use is an error that leads to the real headers and never to different code.
# Sources with tensor cores include mma.h, which is not in the wheels and not needed for mma.sync.
_STAND_IN_HEADERS = {
    "cuda/std/cstdint": """#pragma once
namespace cuda { namespace std {
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
} }
""",
    "cuda/std/type_traits": """#pragma once
namespace cuda { namespace std {
template <class A, class B> struct is_same;
template <class A, class B> struct is_same_v;
template <class T> struct is_integral;
template <class T> struct is_signed;
template <class T> struct is_unsigned;
template <class T> struct is_floating_point;
template <bool C, class T = void> struct enable_if;
template <bool C, class A, class B> struct conditional;
} }
""",
    "mma.h": "#pragma once\n",
}


@dataclass(frozen=True)
class Resources:
    """Resource usage of a kernel as ptxas reports it."""

    registers: int  # number of 32-bit registers per thread
    spills: int  # bytes of spill stores and spill loads in the code of one thread; ideally 0
    stack_bytes: int  # stack frame in local memory per thread, including spilled registers
    shared_bytes: int  # static shared memory per block
    # constant banks with parameters and literals; None from sm_90 on, where ptxas does not report it
    constant_bytes: int | None


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture: an ELF file, and the resource usage of each kernel by name."""

    image: bytes  # ELF file that the CUDA driver loads
    kernels: Mapping[str, Resources]  # resource usage of each kernel by name
    log: str  # output of NVRTC and ptxas
    has_lines: bool = False  # whether the image includes source lines of instructions

    @property
    def resources(self) -> Resources:
        """Maximum of each resource over the kernels."""
        columns = zip(*map(astuple, self.kernels.values()), strict=True)
        maxima: list[Any] = [max((n for n in column if n is not None), default=None) for column in columns]
        return Resources(*maxima)


def explain_unavailability() -> str | None:
    """Return why NVRTC is not available, with a remedy in one line; None if it is available."""
    package = "cuda.bindings"
    try:
        from cuda.bindings import nvrtc

        package = "nvrtc"  # cuda-bindings does not depend on the library, which the first call loads
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        return f"NVRTC is not available ({cause}); {format_install_command(package)}"
    return None


def get_version() -> str:
    """Return the version of NVRTC, such as "13.4"; raises `CompileError` if it is not available."""
    _, major, minor = _load_nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def list_architectures() -> tuple[int, ...]:
    """Return the numbers of the architectures that NVRTC supports, such as 90 for sm_90; empty if unavailable."""
    return () if explain_unavailability() else tuple(_load_nvrtc().nvrtcGetSupportedArchs()[1])


SOURCE_NAME = "kernel.cu"  # file name in messages and line information


def compile_cubin(source: str, arch: str, *, with_lines: bool = False, options: Sequence[str] = ()) -> Cubin:
    """Compile complete CUDA source to machine code of a real architecture; this function is thread-safe.

    Source lines of instructions are included with `with_lines`, without changing the instructions. `options` are
    further options of NVRTC, such as folders of headers.

    Raises:
        CompileError: NVRTC is not available, does not support `arch`, or rejects the source; with its first error.
    """
    options = (*options, *(("-lineinfo",) if with_lines else ()))

    def compile_with(*extra_options: str) -> Cubin:
        image, log = _compile_image(source, arch, "cubin", *extra_options, *options)
        return Cubin(image, _parse_resource_report(log), log, with_lines)

    cubin = compile_with()
    # ptxas spills registers so that more blocks fit in a multiprocessor, although dynamic shared memory, which it does
    # not know, may prevent that anyway.
    if cubin.kernels and cubin.resources.spills and "extern __shared__" in source:
        one_block_cubin = compile_with("--ptxas-options=--minnctapersm=1")
        if one_block_cubin.resources.spills < cubin.resources.spills:
            return one_block_cubin
    return cubin


def compile_ptx(source: str, arch: str) -> str:
    """Compile CUDA source to PTX for the virtual architecture of `arch`; see `compile_cubin`."""
    image, _ = _compile_image(source, arch, "ptx")
    return image.decode().rstrip("\0")


def select_arch_variant(source: str, arch: str) -> str:
    """Return the architecture to compile a source for: "sm_90a" instead of "sm_90" if its instructions require it.

    Code for sm_90a runs only on devices of sm_90. Source: PTX ISA, "Target ISA Notes" of wgmma.mma_async and
    setmaxnreg.
    """
    match = re.fullmatch(r"sm_(\d+)", arch)
    has_variant = match is not None and int(match[1]) >= 90
    return f"{arch}a" if has_variant and re.search(r"\b(wgmma|setmaxnreg)\.", source) else arch


def _load_nvrtc():
    """Return the module `cuda.bindings.nvrtc`; raises `CompileError` if it is not available."""
    if reason := explain_unavailability():
        raise CompileError(reason)
    from cuda.bindings import nvrtc

    return nvrtc


def _compile_image(source: str, arch: str, kind: str, *extra_options: str) -> tuple[bytes, str]:
    """Return the image ("cubin" or "ptx") and the log, compiled with the replacement headers or the real ones."""
    nvrtc = _load_nvrtc()
    _check_arch(arch)
    # NVRTC compiles machine code for a real architecture (sm_) and PTX for a virtual one (compute_).
    real_arch = select_arch_variant(source, arch)
    target = real_arch if kind == "cubin" else real_arch.replace("sm_", "compute_")
    options = [f"--gpu-architecture={target}", *_OPTIONS, *extra_options]
    options += [f"-I{path}" for path in _find_include_directories()]
    image, log = _run_nvrtc(nvrtc, source, options, _STAND_IN_HEADERS, kind)
    if kind == "cubin" and image is not None and "Used" not in log:  # NVRTC's cache omits the report of ptxas
        options.append("--no-cache")
        image, log = _run_nvrtc(nvrtc, source, options, _STAND_IN_HEADERS, kind)
    # Errors of ptxas, such as too much shared memory, occur after parsing, so other headers do not help.
    if image is None and "ptxas error" not in log:
        image, log = _run_nvrtc(nvrtc, source, options, {}, kind)
    if image is None:
        raise CompileError(f"NVRTC {get_version()} rejects the kernel for {arch}: {_find_first_error(log)}")
    return image, log


def _run_nvrtc(nvrtc, source: str, options: list[str], headers: dict[str, str], kind: str) -> tuple[bytes | None, str]:
    """Run NVRTC with in-memory headers before the include path; return the image, or None, and the log."""
    contents, names = ([text.encode() for text in strings] for strings in (headers.values(), headers.keys()))
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), SOURCE_NAME.encode(), len(headers), contents, names)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _read_result(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        # The parts of NVRTC and ptxas in the log each end with a NUL.
        text = log.decode(errors="replace").replace("\0", "\n").strip()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, name = nvrtc.nvrtcGetErrorString(status)
            return None, text or f"error: {name.decode()}"
        if kind == "cubin":
            return _read_result(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), text
        return _read_result(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read_result(program, get_size, get_result) -> bytes:
    """Return a result of a program, which NVRTC provides as a size and a copy function."""
    _, size = get_size(program)
    buffer = bytearray(size)
    get_result(program, buffer)
    return bytes(buffer)


def _check_arch(arch: str) -> None:
    """Raise CompileError unless `arch` has the form sm_NN or sm_NNa and NVRTC supports it."""
    match = re.fullmatch(r"sm_(\d{2,3})a?", arch)
    if match is None or int(match[1]) not in list_architectures():
        supported = ", ".join(f"sm_{number}" for number in list_architectures())
        raise CompileError(f"NVRTC {get_version()} does not support {arch!r}: expected one of {supported}")


def _find_include_directories() -> list[str]:
    """Return the folders of the CUDA runtime and cuda/std headers, in wheels or an installed toolkit."""
    from cuda.pathfinder import find_nvidia_header_directory

    return [path for library in ("cudart", "cccl") if (path := find_nvidia_header_directory(library))]


def _find_first_error(log: str) -> str:
    lines = [line for line in log.splitlines() if re.search(r"\berror\b", line)]
    return " ".join((lines or [log])[0].split())


def _parse_resource_report(log: str) -> dict[str, Resources]:
    """Parse the report of ptxas, and return the resource usage by kernel name.

    An example of the report, which omits unused resources:

        ptxas info    : Compiling entry function 'main_kernel' for 'sm_80'
        ptxas info    : Function properties for main_kernel
        ptxas         .     888 bytes stack frame, 908 bytes spill stores, 1228 bytes spill loads
        ptxas info    : Used 64 registers, used 1 barriers, 1920 bytes smem, 364 bytes cmem[0]
    """
    _, *fields = re.split(r"Compiling entry function '(\w+)'", log)
    return {name: _parse_kernel_resources(report) for name, report in zip(fields[::2], fields[1::2], strict=True)}


def _parse_kernel_resources(report: str) -> Resources:
    def find_number(pattern: str) -> int:
        match = re.search(pattern, report)
        return int(match[1]) if match else 0

    usage = re.search(r"Used \d+ registers.*", report)
    constants = re.findall(r"(\d+) bytes cmem\[\d+\]", usage[0]) if usage else []
    return Resources(
        registers=find_number(r"Used (\d+) registers"),
        spills=find_number(r"(\d+) bytes spill stores") + find_number(r"(\d+) bytes spill loads"),
        stack_bytes=find_number(r"(\d+) bytes stack frame"),
        shared_bytes=find_number(r"(\d+) bytes smem"),
        constant_bytes=sum(map(int, constants)) if constants else None,
    )
