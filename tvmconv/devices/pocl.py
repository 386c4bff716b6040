"""In-memory patch of PoCL for processors that are newer than its LLVM.

PoCL 3.0, which pyopencl[pocl] installs, compiles for the processor that its LLVM 14 detects. LLVM calls an unknown
processor "generic". Clang does not accept that name for x86, so every kernel fails with "unknown target CPU 'generic'"
(pocl/pocl issue 1049). No environment variable or build option of PoCL 3.0 sets the name. `patch_cpu_name` therefore
replaces the detection function by one that returns "x86-64-v3". It patches only libraries in pyopencl's wheel, and only
if they return "generic".
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from importlib.util import find_spec
from pathlib import Path

UNKNOWN_CPU, SUBSTITUTE_CPU = b"generic", b"x86-64-v3"  # AVX2, for which PoCL's built-in library is compiled
_REQUIRED_FEATURES = frozenset({"avx2", "bmi2", "fma"})
_PROT_ALL = 7  # PROT_READ | PROT_WRITE | PROT_EXEC
_cpu_name_buffer = ctypes.create_string_buffer(SUBSTITUTE_CPU)  # module-level, so that its address stays valid


def patch_cpu_name(unknown_name: bytes = UNKNOWN_CPU) -> None:
    """Let PoCL's wheel compile for x86-64-v3 if its LLVM does not know the processor; call it before using PoCL.

    `unknown_name`: name that LLVM gives to an unknown processor.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return
    for file in _find_libraries():
        try:
            get_cpu_name = ctypes.CDLL(str(file)).pocl_get_llvm_cpu_name
        except (OSError, AttributeError):
            continue
        get_cpu_name.restype = ctypes.c_char_p
        if get_cpu_name() == unknown_name and _read_cpu_features() >= _REQUIRED_FEATURES:
            _patch_code(_get_address(get_cpu_name), _make_strdup_stub())


def _find_libraries() -> list[Path]:
    spec = find_spec("pyopencl")
    folders = spec.submodule_search_locations if spec else None
    return [file for folder in folders or () for file in sorted(Path(folder, ".libs").glob("libpocl-*.so"))]


def _read_cpu_features() -> set[str]:
    """Return the names of the processor's features in /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def _make_strdup_stub() -> bytes:
    """Return machine code for `return strdup(_cpu_name_buffer)`; the caller of the function frees the result."""
    name_address, strdup_address = ctypes.addressof(_cpu_name_buffer), _get_address(ctypes.CDLL(None).strdup)
    # mov rdi, name; mov rax, strdup; jmp rax
    name, strdup = name_address.to_bytes(8, "little"), strdup_address.to_bytes(8, "little")
    return b"\x48\xbf" + name + b"\x48\xb8" + strdup + b"\xff\xe0"


def _get_address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def _patch_code(address: int, code: bytes) -> None:
    """Overwrite machine code of this process, or do nothing if the system does not allow it."""
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + len(code) - page
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    if protect(page, length, _PROT_ALL) == 0:
        ctypes.memmove(address, code, len(code))
        protect(page, length, _PROT_ALL & ~2)
