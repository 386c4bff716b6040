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
from tvmconv.optional_packages import format_install_command

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
        has_lines: whether the image tells the lines of the text.
    """

    image: bytes
    kernels: Mapping[str, Resources]
    log: str
    has_lines: bool = False

    @property
    def resources(self) -> Resources:
        """Of each resource, what the kernel takes that takes most of it."""
        return max_resources(list(self.kernels.values()))


def max_resources(kernels: Sequence[Resources]) -> Resources:
    """Of each resource, what the kernel takes that takes most of it; of kernels that run one after another."""
    constant_bytes = [kernel.constant_bytes for kernel in kernels if kernel.constant_bytes is not None]
    return Resources(
        registers=max(kernel.registers for kernel in kernels),
        spills=max(kernel.spills for kernel in kernels),
        stack_bytes=max(kernel.stack_bytes for kernel in kernels),
        shared_bytes=max(kernel.shared_bytes for kernel in kernels),
        constant_bytes=max(constant_bytes) if constant_bytes else None,
    )


def explain_unavailability() -> str | None:
    """Why NVRTC cannot be used here, with the remedy, in one line; None if it can."""
    package = "cuda.bindings"
    try:
        from cuda.bindings import nvrtc

        package = "nvrtc"  # cuda-bindings installs without the library, which is loaded at the first call
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        return f"NVRTC is not available ({cause}); {format_install_command(package)}"
    return None


def get_version() -> str:
    """NVRTC's version, such as "13.4".

    Raises:
        CompileError: NVRTC is not available.
    """
    _, major, minor = _load_nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def list_architectures() -> tuple[int, ...]:
    """The architectures that NVRTC compiles for, as 90 for sm_90; none where it is not available."""
    return () if explain_unavailability() else tuple(_load_nvrtc().nvrtcGetSupportedArchs()[1])


SOURCE_NAME = "kernel.cu"  # what the text is called, in messages and where lines are told
_LINE_INFO_OPTION = "-lineinfo"


def compile_cubin(source: str, arch: str, *, with_lines: bool = False) -> Cubin:
    """Compile CUDA text to machine code. May be called from several threads at once.

    Args:
        source: the whole text as `inspect_source()` of TVM's CUDA module gives it, or any CUDA C++ of its own. One with
            dynamic shared memory that spills is compiled once more, for a single block to be enough.
        arch: a real architecture, such as "sm_90" or "sm_90a".
        with_lines: tell of each instruction which line of the text it is of; the instructions are the same.

    Raises:
        CompileError: NVRTC is not available, does not know `arch`, or rejects the text (with its first error).
    """
    extra_options = (_LINE_INFO_OPTION,) if with_lines else ()
    cubin = _compile_with_options(source, arch, *extra_options)
    if cubin.kernels and cubin.resources.spills and _DYNAMIC_SHARED_DECLARATION in source:
        one_block_cubin = _compile_with_options(source, arch, _ONE_BLOCK_OPTION, *extra_options)
        if one_block_cubin.resources.spills < cubin.resources.spills:
            return one_block_cubin
    return cubin


# ptxas spills registers for one more block to fit in a multiprocessor, and does not know of the shared memory that the
# launch asks for, which may leave no room for it.
_DYNAMIC_SHARED_DECLARATION = "extern __shared__"
_ONE_BLOCK_OPTION = "--ptxas-options=--minnctapersm=1"


def _compile_with_options(source: str, arch: str, *extra_options: str) -> Cubin:
    """The machine code, with more options."""
    image, log = _compile_image(source, arch, "cubin", *extra_options)
    return Cubin(image, _parse_resource_report(log), log, _LINE_INFO_OPTION in extra_options)


def compile_ptx(source: str, arch: str) -> str:
    """Compile CUDA text to PTX for the virtual architecture of `arch`; arguments and errors as `compile_cubin`."""
    image, _ = _compile_image(source, arch, "ptx")
    return image.decode().rstrip("\0")


# Instructions that code for sm_90 may not have, and code for sm_90a may: PTX ISA, "Target ISA Notes" of wgmma.mma_async
# and of setmaxnreg.
_ARCH_SPECIFIC_INSTRUCTION = re.compile(r"\b(wgmma|setmaxnreg)\.")
_ARCH_SPECIFIC_MIN_NUMBER = 90


def select_arch_variant(source: str, arch: str) -> str:
    """The architecture to compile a text for, such as "sm_90a" in place of "sm_90" where the text needs it.

    Code for sm_90a runs on devices of sm_90 and on no others.
    """
    match = re.fullmatch(r"sm_(\d+)", arch)
    has_variant = match is not None and int(match[1]) >= _ARCH_SPECIFIC_MIN_NUMBER
    return f"{arch}a" if has_variant and _ARCH_SPECIFIC_INSTRUCTION.search(source) else arch


def _load_nvrtc():
    """The module `cuda.bindings.nvrtc`, known to work."""
    if reason := explain_unavailability():
        raise CompileError(reason)
    from cuda.bindings import nvrtc

    return nvrtc


def _compile_image(source: str, arch: str, kind: str, *extra_options: str) -> tuple[bytes, str]:
    """The image of `kind` ("cubin" or "ptx") and the log, with the stand-ins or else with the real headers."""
    nvrtc = _load_nvrtc()
    _check_arch(arch)
    # NVRTC makes machine code for a real architecture (sm_) and PTX for a virtual one (compute_).
    real_arch = select_arch_variant(source, arch)
    target = real_arch if kind == "cubin" else real_arch.replace("sm_", "compute_")
    options = [f"--gpu-architecture={target}", *_OPTIONS, *extra_options]
    options += [f"-I{path}" for path in _find_include_directories()]
    image, log = _run_nvrtc(nvrtc, source, options, _STAND_IN_HEADERS, kind)
    if (
        kind == "cubin" and image is not None and "Used" not in log
    ):  # it came from NVRTC's cache, without ptxas's report
        options.append("--no-cache")
        image, log = _run_nvrtc(nvrtc, source, options, _STAND_IN_HEADERS, kind)
    # An error of ptxas (too much shared memory, say) comes after the parser: other headers do not help.
    if image is None and "ptxas error" not in log:
        image, log = _run_nvrtc(nvrtc, source, options, {}, kind)
    if image is None:
        raise CompileError(f"NVRTC {get_version()} rejects the kernel for {arch}: {_find_first_error(log)}")
    return image, log


def _run_nvrtc(nvrtc, source: str, options: list[str], headers: dict[str, str], kind: str) -> tuple[bytes | None, str]:
    """One run of NVRTC with `headers` in memory before the include path: the image, or None, and the log."""
    contents, names = ([text.encode() for text in strings] for strings in (headers.values(), headers.keys()))
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), SOURCE_NAME.encode(), len(headers), contents, names)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _read_result(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        # NVRTC's part and ptxas's part of the log each end with a NUL.
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
    """One of a program's results, which NVRTC hands out as a size and a copy."""
    _, size = get_size(program)
    buffer = bytearray(size)
    get_result(program, buffer)
    return bytes(buffer)


def _check_arch(arch: str) -> None:
    """Raise CompileError unless `arch` is written sm_NN or sm_NNa and NVRTC knows the number."""
    match = re.fullmatch(r"sm_(\d{2,3})a?", arch)
    if match is None or int(match[1]) not in list_architectures():
        supported = ", ".join(f"sm_{number}" for number in list_architectures())
        raise CompileError(f"NVRTC {get_version()} has no architecture {arch!r}; it has {supported}")


def _find_include_directories() -> list[str]:
    """Where cuda_fp16.h and the like, and the cuda/std headers lie: in wheels or in an installed toolkit."""
    from cuda.pathfinder import find_nvidia_header_directory

    return [path for library in ("cudart", "cccl") if (path := find_nvidia_header_directory(library))]


def _find_first_error(log: str) -> str:
    """The first line of the log that tells an error, its blanks squeezed."""
    lines = [line for line in log.splitlines() if re.search(r"\berror\b", line)]
    return " ".join((lines or [log])[0].split())


def _parse_resource_report(log: str) -> dict[str, Resources]:
    """Read ptxas's report: what each kernel takes, by name.

    Such a report reads, a feature that is not used left out:

        ptxas info    : Compiling entry function 'main_kernel' for 'sm_80'
        ptxas info    : Function properties for main_kernel
        ptxas         .     888 bytes stack frame, 908 bytes spill stores, 1228 bytes spill loads
        ptxas info    : Used 64 registers, used 1 barriers, 1920 bytes smem, 364 bytes cmem[0]
    """
    _, *fields = re.split(r"Compiling entry function '(\w+)'", log)
    return {name: _parse_kernel_resources(report) for name, report in zip(fields[::2], fields[1::2], strict=True)}


def _parse_kernel_resources(report: str) -> Resources:
    """What one kernel takes."""

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
