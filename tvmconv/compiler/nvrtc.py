"""CUDA text to cubin or PTX through NVRTC, NVIDIA's runtime compiler, which needs no GPU.

TVM's own NVRTC call spends over a second a kernel, nearly all of it parsing the `<cuda/std/...>` headers that the text
includes for the integer type names. Here NVRTC first gets the same text with two short stand-ins for those headers,
handed over in memory; only a text that needs more of them is compiled again with the real ones. The options are those
of `tvm.support.nvcc`, and so are the instructions that come out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvmconv.errors import CompileError
from tvmconv.extras import how_to_install

# `-default-device` to `--use_fast_math` and the register level as in tvm.support.nvcc; `-v` prints the resources.
# Warnings go, because they are about variables that TVM's code generator names and does not use.
_OPTIONS = (
    "-default-device",
    "--device-int128",
    "--use_fast_math",
    "--ptxas-options=-v",
    "--ptxas-options=--register-usage-level=10",
    "--disable-warnings",
)

# What the head of TVM's text takes from these headers (tvm/backend/cuda/codegen/header.py). Whatever else a kernel
# uses of them is undeclared or incomplete here: an error that leads to the real headers, never to other code. Of mma.h,
# which a text with tensor cores includes and whose own headers the wheels lack, nothing is needed for mma.sync.
_STAND_INS = {
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
    """What one thread or block of a kernel takes, as ptxas reports it.

    Attributes:
        registers: 32-bit registers a thread.
        spills: bytes of register spills, stores plus loads, in the text of one thread; 0 is what one wants.
        stack_bytes: local memory a thread for its stack frame, spilled registers among it.
        shared_bytes: static shared memory a block.
        constant_bytes: constant banks of the kernel's own, which hold its parameters and literals; None from sm_90 on,
            where ptxas does not tell.
    """

    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    constant_bytes: int | None


@dataclass(frozen=True)
class Cubin:
    """A kernel's machine code for one architecture.

    Attributes:
        image: the ELF file that the CUDA driver loads and `tvmconv.compiler.sass.disassemble` reads.
        kernels: what each of its kernels takes, by name.
        log: NVRTC's and ptxas's words on it.
        lines: whether the image tells the lines of the text.
    """

    image: bytes
    kernels: Mapping[str, Resources]
    log: str
    lines: bool = False

    @property
    def resources(self) -> Resources:
        """Of each resource, what the kernel takes that takes most of it."""
        return worst(list(self.kernels.values()))


def worst(kernels: Sequence[Resources]) -> Resources:
    """Of each resource, what the kernel takes that takes most of it; of kernels that run one after another."""
    constants = [each.constant_bytes for each in kernels if each.constant_bytes is not None]
    return Resources(
        registers=max(each.registers for each in kernels),
        spills=max(each.spills for each in kernels),
        stack_bytes=max(each.stack_bytes for each in kernels),
        shared_bytes=max(each.shared_bytes for each in kernels),
        constant_bytes=max(constants) if constants else None,
    )


def unavailable() -> str | None:
    """Why NVRTC cannot be used here, with the remedy, in one line; None if it can."""
    missing = "cuda.bindings"
    try:
        from cuda.bindings import nvrtc

        missing = "nvrtc"  # cuda-bindings installs without the library, which is loaded at the first call
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        return f"NVRTC is not available ({cause}); {how_to_install(missing)}"
    return None


def version() -> str:
    """NVRTC's version, such as "13.4".

    Raises:
        CompileError: NVRTC is not available.
    """
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def architectures() -> tuple[int, ...]:
    """The architectures that NVRTC compiles for, as 90 for sm_90; none where it is not available."""
    return () if unavailable() else tuple(_nvrtc().nvrtcGetSupportedArchs()[1])


FILE = "kernel.cu"  # what the text is called, in messages and where lines are told
_LINES = "-lineinfo"


def compile_cubin(source: str, arch: str, *, lines: bool = False) -> Cubin:
    """Compile CUDA text to machine code. May be called from several threads at once.

    Args:
        source: the whole text as `inspect_source()` of TVM's CUDA module gives it, or any CUDA C++ of its own. One with
            dynamic shared memory that spills is compiled once more, for a single block to be enough.
        arch: a real architecture, such as "sm_90" or "sm_90a".
        lines: tell of each instruction which line of the text it is of; the instructions are the same.

    Raises:
        CompileError: NVRTC is not available, does not know `arch`, or rejects the text (with its first error).
    """
    more = (_LINES,) if lines else ()
    cubin = _cubin(source, arch, *more)
    if cubin.kernels and cubin.resources.spills and _DYNAMIC_SHARED in source:
        roomy = _cubin(source, arch, _ONE_BLOCK, *more)
        if roomy.resources.spills < cubin.resources.spills:
            return roomy
    return cubin


# ptxas spills registers for one more block to fit in a multiprocessor, and does not know of the shared memory that the
# launch asks for, which may leave no room for it.
_DYNAMIC_SHARED = "extern __shared__"
_ONE_BLOCK = "--ptxas-options=--minnctapersm=1"


def _cubin(source: str, arch: str, *more: str) -> Cubin:
    """The machine code, with more options."""
    image, log = _compile(source, arch, "cubin", *more)
    return Cubin(image, _kernels(log), log, _LINES in more)


def compile_ptx(source: str, arch: str) -> str:
    """Compile CUDA text to PTX for the virtual architecture of `arch`; arguments and errors as `compile_cubin`."""
    image, _ = _compile(source, arch, "ptx")
    return image.decode().rstrip("\0")


# Instructions that code for sm_90 may not have, and code for sm_90a may: PTX ISA, "Target ISA Notes" of wgmma.mma_async
# and of setmaxnreg.
_SPECIFIC = re.compile(r"\b(wgmma|setmaxnreg)\.")
_SPECIFIC_SINCE = 90


def specific(source: str, arch: str) -> str:
    """The architecture to compile a text for, such as "sm_90a" in place of "sm_90" where the text needs it.

    Code for sm_90a runs on devices of sm_90 and on no others.
    """
    number = re.fullmatch(r"sm_(\d+)", arch)
    has_variant = number is not None and int(number[1]) >= _SPECIFIC_SINCE
    return f"{arch}a" if has_variant and _SPECIFIC.search(source) else arch


def _nvrtc():
    """The module `cuda.bindings.nvrtc`, known to work."""
    if reason := unavailable():
        raise CompileError(reason)
    from cuda.bindings import nvrtc

    return nvrtc


def _compile(source: str, arch: str, kind: str, *more: str) -> tuple[bytes, str]:
    """The image of `kind` ("cubin" or "ptx") and the log, with the stand-ins or else with the real headers."""
    nvrtc = _nvrtc()
    _check_arch(arch)
    # NVRTC makes machine code for a real architecture (sm_) and PTX for a virtual one (compute_).
    real = specific(source, arch)
    target = real if kind == "cubin" else real.replace("sm_", "compute_")
    options = [f"--gpu-architecture={target}", *_OPTIONS, *more]
    options += [f"-I{path}" for path in _include_directories()]
    image, log = _attempt(nvrtc, source, options, _STAND_INS, kind)
    if (
        kind == "cubin" and image is not None and "Used" not in log
    ):  # it came from NVRTC's cache, without ptxas's report
        options.append("--no-cache")
        image, log = _attempt(nvrtc, source, options, _STAND_INS, kind)
    # An error of ptxas (too much shared memory, say) comes after the parser: other headers do not help.
    if image is None and "ptxas error" not in log:
        image, log = _attempt(nvrtc, source, options, {}, kind)
    if image is None:
        raise CompileError(f"NVRTC {version()} rejects the kernel for {arch}: {_first_error(log)}")
    return image, log


def _attempt(nvrtc, source: str, options: list[str], headers: dict[str, str], kind: str) -> tuple[bytes | None, str]:
    """One run of NVRTC with `headers` in memory before the include path: the image, or None, and the log."""
    contents, names = ([text.encode() for text in texts] for texts in (headers.values(), headers.keys()))
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), FILE.encode(), len(headers), contents, names)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        # NVRTC's part and ptxas's part of the log each end with a NUL.
        text = log.decode(errors="replace").replace("\0", "\n").strip()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, name = nvrtc.nvrtcGetErrorString(status)
            return None, text or f"error: {name.decode()}"
        if kind == "cubin":
            return _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), text
        return _read(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(program, get_size, get) -> bytes:
    """One of a program's results, which NVRTC hands out as a size and a copy."""
    _, size = get_size(program)
    buffer = bytearray(size)
    get(program, buffer)
    return bytes(buffer)


def _check_arch(arch: str) -> None:
    """Raise CompileError unless `arch` is written sm_NN or sm_NNa and NVRTC knows the number."""
    match = re.fullmatch(r"sm_(\d{2,3})a?", arch)
    if match is None or int(match[1]) not in architectures():
        known = ", ".join(f"sm_{number}" for number in architectures())
        raise CompileError(f"NVRTC {version()} has no architecture {arch!r}; it has {known}")


def _include_directories() -> list[str]:
    """Where cuda_fp16.h and the like, and the cuda/std headers lie: in wheels or in an installed toolkit."""
    from cuda.pathfinder import find_nvidia_header_directory

    return [path for library in ("cudart", "cccl") if (path := find_nvidia_header_directory(library))]


def _first_error(log: str) -> str:
    """The first line of the log that tells an error, its blanks squeezed."""
    lines = [line for line in log.splitlines() if re.search(r"\berror\b", line)]
    return " ".join((lines or [log])[0].split())


def _kernels(log: str) -> dict[str, Resources]:
    """Read ptxas's report: what each kernel takes, by name.

    Such a report reads, a feature that is not used left out:

        ptxas info    : Compiling entry function 'main_kernel' for 'sm_80'
        ptxas info    : Function properties for main_kernel
        ptxas         .     888 bytes stack frame, 908 bytes spill stores, 1228 bytes spill loads
        ptxas info    : Used 64 registers, used 1 barriers, 1920 bytes smem, 364 bytes cmem[0]
    """
    _, *parts = re.split(r"Compiling entry function '(\w+)'", log)
    return {name: _resources(report) for name, report in zip(parts[::2], parts[1::2], strict=True)}


def _resources(report: str) -> Resources:
    """What one kernel takes."""

    def number(pattern: str) -> int:
        match = re.search(pattern, report)
        return int(match[1]) if match else 0

    used = re.search(r"Used \d+ registers.*", report)
    constants = re.findall(r"(\d+) bytes cmem\[\d+\]", used[0]) if used else []
    return Resources(
        registers=number(r"Used (\d+) registers"),
        spills=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=number(r"(\d+) bytes smem"),
        constant_bytes=sum(map(int, constants)) if constants else None,
    )
