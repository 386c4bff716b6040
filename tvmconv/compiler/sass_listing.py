"""Listings of machine instructions with their source lines.

NVRTC records lines with `-lineinfo`, which does not change the instructions, and nvdisasm prints them. Instructions of
an inlined function have the line of its call.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from tvmconv.compiler import nvrtc, sass

MAX_ATTEMPTS = 5

# `        /*0a10*/              @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;`
_INSTRUCTION_LINE = re.compile(
    r"\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*(.*?)\s*;"
)
_LABEL = re.compile(r"(\.[\w.$]+):")
_SECTION_PREFIX = ".text."
_LINE_COMMENT = re.compile(r'//## File "[^"]*?([^"/]+)", line (\d+)')
_BRANCH_TARGET = re.compile(r"`\((\.\w+)\)")


@dataclass(frozen=True)
class SassInstruction:
    """One machine instruction, such as predicate `@!P0`, opcode `LDG`, modifiers `E` and `128`, and operands."""

    address: int  # offset from the start of the kernel in bytes
    predicate: str
    opcode: str
    modifiers: tuple[str, ...]
    operands: str
    target_address: int | None = None  # address of the label in the operands; None without one
    source_line: int | None = None  # line of the CUDA source, from 1; None if unknown

    @property
    def name(self) -> str:
        """Opcode with modifiers."""
        return ".".join((self.opcode, *self.modifiers))

    @property
    def text(self) -> str:
        """Complete text of the instruction."""
        return " ".join(filter(None, (self.predicate, self.name, self.operands)))


Listing = tuple[SassInstruction, ...]


def disassemble_with_lines(source: str, arch: str, cubin: nvrtc.Cubin) -> str:
    """Disassemble the binary of a CUDA source with source lines as comments.

    A binary without lines is compiled again. NVRTC generates different code in about one of ten runs, so compilation is
    repeated until the code equals that of the binary.
    """
    cubin_with_lines = cubin
    if not cubin.has_lines:
        expected_code = sass.extract_code_sections(cubin.image)
        for _ in range(MAX_ATTEMPTS):
            cubin_with_lines = nvrtc.compile_cubin(source, arch, with_lines=True)
            if sass.extract_code_sections(cubin_with_lines.image) == expected_code:
                break
    return sass.disassemble(cubin_with_lines.image, with_lines=True)


def parse_disassembly(text: str) -> dict[str, Listing]:
    """Return the instructions of each kernel in a disassembly, by kernel name."""
    matches: dict[str, list[tuple[re.Match[str], int | None]]] = {}
    labels: dict[str, dict[str, int]] = {}
    pending_labels: list[str] = []  # labels of the next instruction
    name, line = "", None
    for text_line in text.splitlines():
        if match := _INSTRUCTION_LINE.match(text_line):
            address = int(match[1], 16)
            labels.setdefault(name, {}).update(dict.fromkeys(pending_labels, address))
            pending_labels.clear()
            matches.setdefault(name, []).append((match, line))
        elif match := _LABEL.match(text_line):
            if match[1].startswith(_SECTION_PREFIX):
                name, line = match[1].removeprefix(_SECTION_PREFIX), None
            pending_labels.append(match[1])
        elif match := _LINE_COMMENT.search(text_line):
            *_, (file, number) = _LINE_COMMENT.findall(text_line.replace("inlined at ", "//## File "))
            line = int(number) if file == nvrtc.SOURCE_NAME else None
    return {name: tuple(_make_instruction(*match, labels[name]) for match in found) for name, found in matches.items()}


@functools.cache
def _split_modifiers(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(".")))


def _make_instruction(match: re.Match[str], line: int | None, labels: dict[str, int]) -> SassInstruction:
    address, predicate, opcode, modifiers, operands = match.groups()
    label = _BRANCH_TARGET.search(operands)
    target = labels.get(label[1]) if label else None
    words = _split_modifiers(modifiers)
    return SassInstruction(int(address, 16), predicate or "", opcode, words, operands, target, line)
