"""A patch of PoCL, in the memory of this process, for processors that are younger than its LLVM.

The defect: PoCL 3.0, which pyopencl[pocl] installs, compiles for the processor that its LLVM 14 detects. LLVM calls a
processor that it does not know "generic". Clang refuses that as the name of an x86 processor, and every kernel fails
with "unknown target CPU 'generic'" (pocl/pocl issue 1049). No variable and no build option of PoCL 3.0 sets the name,
and its other CPU device asks the same function. So `patch_cpu_name` replaces that function by one that returns
"x86-64-v3". Only libraries that lie beside pyopencl's own are patched, and only where they return "generic".
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from importlib.util import find_spec
from pathlib import Path

UNKNOWN_CPU, SUBSTITUTE_CPU = b"generic", b"x86-64-v3"  # AVX2, which PoCL's library of functions is compiled for
_REQUIRED_FEATURES = frozenset({"avx2", "bmi2", "fma"})
_PROT_ALL = 7  # PROT_READ | PROT_WRITE | PROT_EXEC
_cpu_name_buffer = ctypes.create_string_buffer(SUBSTITUTE_CPU)  # its address stays


def patch_cpu_name(unknown_name: bytes = UNKNOWN_CPU) -> None:
    """Let PoCL's wheel compile for x86-64-v3 where its LLVM does not know the processor; call it before PoCL is used.

    Args:
        unknown_name: what LLVM calls such a processor.
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
    """PoCL's libraries that lie beside pyopencl's own."""
    spec = find_spec("pyopencl")
    folders = spec.submodule_search_locations if spec else None
    return [file for folder in folders or () for file in sorted(Path(folder, ".libs").glob("libpocl-*.so"))]


def _read_cpu_features() -> set[str]:
    """What the processor has, by the names of Linux."""
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def _make_strdup_stub() -> bytes:
    """Machine code: `return strdup(_cpu_name_buffer)`, as whoever asks frees what it is given."""
    name_address, strdup_address = ctypes.addressof(_cpu_name_buffer), _get_address(ctypes.CDLL(None).strdup)
    # mov rdi, name; mov rax, strdup; jmp rax
    return (
        b"\x48\xbf"
        + name_address.to_bytes(8, "little")
        + b"\x48\xb8"
        + strdup_address.to_bytes(8, "little")
        + b"\xff\xe0"
    )


def _get_address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def _patch_code(address: int, code: bytes) -> None:
    """Overwrite machine code of this process; nothing is done where the system does not let one."""
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + len(code) - page
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    if protect(page, length, _PROT_ALL) == 0:
        ctypes.memmove(address, code, len(code))
        protect(page, length, _PROT_ALL & ~2)
