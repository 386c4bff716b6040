"""Disassembly of machine code (SASS), counts of its instructions, and code sections of a cubin."""

import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from tvmconv.errors import CompileError
from tvmconv.optional_packages import format_install_command

# `    /*0a10*/    @!P0 LDG.E.128.CONSTANT R4, [R2.64] ;`: address, optional predicate, instruction
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)", re.MULTILINE)

SYSTEM_CUDA_DIR = "/usr/local/cuda"  # default folder of NVIDIA's Linux installers, which may not be on PATH
# 64-bit addresses (E) and access widths other than 32 bits; rounding, caching and other modifiers are dropped.
_COUNTED_MODIFIERS = {"E", "U8", "S8", "U16", "S16", "64", "128"}


def disassemble(image: bytes, *, with_lines: bool = False) -> str:
    """Disassemble a cubin with nvdisasm, or with cuobjdump, which does not support lines, if only that is installed.

    The text has the instructions of all kernels, one per line after its address in a comment. With `with_lines`, it
    has source lines as comments if the image has them.
    """
    command = find_disassembler(with_lines=with_lines)
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"  # the tools require a file
        cubin.write_bytes(image)
        process = subprocess.run([*command, str(cubin)], capture_output=True, text=True)
    if process.returncode:
        cause = (process.stderr.strip() or f"exit status {process.returncode}").splitlines()[0]
        raise CompileError(f"{Path(command[0]).name} cannot disassemble the {len(image)} bytes given: {cause}")
    return process.stdout


def count_instructions(sass: str) -> dict[str, int]:
    """Count the static instructions in a disassembly.

    Names keep only modifiers for the width of memory accesses: "FFMA", "LDS", "LDS.128", "LDG.E.64", "STL". Local loads
    and stores (LDL, STL) are register spills or an array that did not fit in registers. The most frequent come first.
    """
    names = Counter(
        ".".join([opcode, *(m for m in modifiers.split(".") if m in _COUNTED_MODIFIERS)])
        for opcode, modifiers in _INSTRUCTION.findall(sass)
    )
    return dict(names.most_common())


def find_disassembler(*, with_lines: bool) -> list[str]:
    """Return the command that prints the machine code of a file, with the lines of the source or without; raise
    CompileError if no disassembler is installed.
    """
    if nvdisasm := _find_packaged_nvdisasm() or _find_system_tool("nvdisasm"):
        line_options = ["--print-line-info-inline"] if with_lines else []
        return [nvdisasm, "--print-code", "--no-dataflow", *line_options]  # equal text, faster
    if not with_lines and (cuobjdump := _find_system_tool("cuobjdump")):
        return [cuobjdump, "--dump-sass"]
    raise CompileError(
        f"nvdisasm is neither installed as a package nor on PATH, in CUDA_HOME or in {SYSTEM_CUDA_DIR}; "
        f"{format_install_command('nvdisasm')}"
    )


def _find_system_tool(name: str) -> str | None:
    """Return the path of a CUDA tool on PATH or in `SYSTEM_CUDA_DIR`; None if it is not installed."""
    return shutil.which(name) or shutil.which(name, path=f"{SYSTEM_CUDA_DIR}/bin")


def _find_packaged_nvdisasm() -> str | None:
    """Return the path of nvdisasm in its wheel or in CUDA_HOME; None if it is missing."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return None
    return find_nvidia_binary_utility("nvdisasm")


_CODE_SECTION_PREFIX = b".text"
_SECTION_TABLE_OFFSET, _SECTION_COUNTS_OFFSET = 0x28, 0x3A  # offsets in the ELF header
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")


def extract_code_sections(image: bytes) -> dict[str, bytes]:
    """Return the machine code of a cubin by section name, which decides whether two cubins are equivalent.

    A cubin is an ELF file. Source: System V Application Binary Interface, chapter 4, "Object Files", 64-bit format.
    """
    try:
        if image[:5] != b"\x7fELF\x02":
            raise CompileError(f"expected a 64-bit ELF file, not the given {len(image)} bytes")
        (table_offset,) = struct.unpack_from("<Q", image, _SECTION_TABLE_OFFSET)
        header_size, num_sections, names_index = struct.unpack_from("<HHH", image, _SECTION_COUNTS_OFFSET)
        offsets = range(table_offset, table_offset + num_sections * header_size, header_size)
        sections = [_SECTION_HEADER.unpack_from(image, offset) for offset in offsets]
    except (struct.error, IndexError) as error:
        raise CompileError(f"expected a complete ELF file, not the given {len(image)} bytes: {error}") from error
    names_offset = sections[names_index][4]
    code_sections = {}
    for name, _, _, _, offset, length, *_ in sections:
        text = image[names_offset + name : image.index(b"\0", names_offset + name)]
        if text.startswith(_CODE_SECTION_PREFIX):
            code_sections[text.decode()] = image[offset : offset + length]
    return code_sections
