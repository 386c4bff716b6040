"""Machine code as text (SASS), and what is in it: does the inner loop load 128 bits at once, does the kernel spill?"""

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from tvmconv.errors import CompileError
from tvmconv.optional_packages import format_install_command

# `    /*0a10*/    @!P0 LDG.E.128.CONSTANT R4, [R2.64] ;` is an address, perhaps a predicate, and the instruction.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)", re.MULTILINE)

# 64-bit addresses (E) and the bits an access moves, where they are not 32; rounding, caching and the like are dropped.
SYSTEM_CUDA_DIR = "/usr/local/cuda"  # where NVIDIA's installers for Linux put a toolkit, which need not be on PATH
_COUNTED_MODIFIERS = {"E", "U8", "S8", "U16", "S16", "64", "128"}


def disassemble(image: bytes, *, with_lines: bool = False) -> str:
    """Disassemble a cubin with nvdisasm, or cuobjdump where only that is installed.

    Args:
        image: a cubin, as `tvmconv.compiler.nvrtc.compile_cubin` makes it.
        with_lines: print the lines of the source that the image tells, in comments.

    Returns:
        The instructions of all its kernels, one a line behind its address in a comment.

    Raises:
        CompileError: neither tool is installed (only nvdisasm prints lines), or it cannot read `image`.
    """
    command = _find_disassembler(with_lines=with_lines)
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"  # the tools read a file only
        cubin.write_bytes(image)
        process = subprocess.run([*command, str(cubin)], capture_output=True, text=True)
    if process.returncode:
        cause = (process.stderr.strip() or f"exit status {process.returncode}").splitlines()[0]
        raise CompileError(f"{Path(command[0]).name} cannot disassemble the {len(image)} bytes given: {cause}")
    return process.stdout


def count_instructions(sass: str) -> dict[str, int]:
    """Count the instructions in the text of a disassembly (each once, however often a loop runs it).

    Names keep those modifiers that tell how much a memory access moves: "FFMA", "LDS", "LDS.128", "LDG.E.64", "STL".
    Local loads and stores (LDL, STL) are spills or an array that did not fit in registers.

    Returns:
        Count by name, the most frequent first.
    """
    names = Counter(
        ".".join([opcode, *(m for m in modifiers.split(".") if m in _COUNTED_MODIFIERS)])
        for opcode, modifiers in _INSTRUCTION.findall(sass)
    )
    return dict(names.most_common())


def _find_disassembler(*, with_lines: bool) -> list[str]:
    """The command to which a cubin's path is to be added."""
    if nvdisasm := _find_packaged_nvdisasm() or _find_system_tool("nvdisasm"):
        line_options = ["--print-line-info-inline"] if with_lines else []
        return [nvdisasm, "--print-code", "--no-dataflow", *line_options]  # so the text is the same, and there sooner
    if not with_lines and (cuobjdump := _find_system_tool("cuobjdump")):
        return [cuobjdump, "--dump-sass"]
    raise CompileError(
        f"nvdisasm is neither installed as a package nor on PATH, in CUDA_HOME or in {SYSTEM_CUDA_DIR}; "
        f"{format_install_command('nvdisasm')}"
    )


def _find_system_tool(name: str) -> str | None:
    """Return the path of a tool of the CUDA toolkit on PATH, else in the folder where CUDA is usually installed."""
    return shutil.which(name) or shutil.which(name, path=f"{SYSTEM_CUDA_DIR}/bin")


def _find_packaged_nvdisasm() -> str | None:
    """Find nvdisasm in the wheel `nvidia-cuda-nvdisasm`, or in a toolkit that CUDA_HOME names."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return None
    return find_nvidia_binary_utility("nvdisasm")
