"""Machine code, instruction by instruction, and the line of the CUDA text that each is of.

The lines are those that NVRTC writes down with `-lineinfo`, which leaves the instructions as they are, and nvdisasm
prints. What is of a function that the compiler put in place of its call counts for the line of the call.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from tvmconv.compiler import nvrtc, sass
from tvmconv.compiler.elf import extract_code_sections

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
    """One instruction.

    Attributes:
        address: in bytes, from the kernel's begin.
        predicate: on which it is executed, such as `@!P0`; empty where it always is.
        opcode: such as `LDG`.
        modifiers: of the opcode, such as `E` and `128`.
        operands: their text.
        target_address: the address that its label stands for; None for one without any.
        source_line: of the CUDA text, from 1 on; None where it is of none.
    """

    address: int
    predicate: str
    opcode: str
    modifiers: tuple[str, ...]
    operands: str
    target_address: int | None = None
    source_line: int | None = None

    @property
    def name(self) -> str:
        """The opcode with its modifiers."""
        return ".".join((self.opcode, *self.modifiers))

    @property
    def text(self) -> str:
        """As it is written."""
        return " ".join(filter(None, (self.predicate, self.name, self.operands)))


Listing = tuple[SassInstruction, ...]


def disassemble_with_lines(source: str, arch: str, cubin: nvrtc.Cubin) -> str:
    """The machine code of a CUDA text, with the lines of the text in comments.

    A binary that does not tell them is compiled once more. One in ten of NVRTC's runs gives other code, so that is made
    again until it is that of the binary.

    Args:
        source: the text.
        arch: such as "sm_90".
        cubin: the binary that was compiled of it.

    Raises:
        CompileError: as `nvrtc.compile_cubin`.
    """
    cubin_with_lines = cubin
    if not cubin.has_lines:
        expected_code = extract_code_sections(cubin.image)
        for _ in range(MAX_ATTEMPTS):
            cubin_with_lines = nvrtc.compile_cubin(source, arch, with_lines=True)
            if extract_code_sections(cubin_with_lines.image) == expected_code:
                break
    return sass.disassemble(cubin_with_lines.image, with_lines=True)


def parse_disassembly(text: str) -> dict[str, Listing]:
    """The instructions of each kernel in a disassembly, by its name."""
    kernel_matches: dict[str, list[tuple[re.Match[str], int | None]]] = {}
    labels: dict[str, dict[str, int]] = {}
    pending_labels: list[str] = []  # labels of what comes next
    name, line = "", None
    for text_line in text.splitlines():
        if match := _INSTRUCTION_LINE.match(text_line):
            address = int(match[1], 16)
            labels.setdefault(name, {}).update(dict.fromkeys(pending_labels, address))
            pending_labels.clear()
            kernel_matches.setdefault(name, []).append((match, line))
        elif match := _LABEL.match(text_line):
            if match[1].startswith(_SECTION_PREFIX):
                name, line = match[1].removeprefix(_SECTION_PREFIX), None
            pending_labels.append(match[1])
        elif match := _LINE_COMMENT.search(text_line):
            *_, (file, number) = _LINE_COMMENT.findall(text_line.replace("inlined at ", "//## File "))
            line = int(number) if file == nvrtc.SOURCE_NAME else None
    return {
        name: tuple(_make_instruction(match, line, labels[name]) for match, line in matches)
        for name, matches in kernel_matches.items()
    }


@functools.cache
def _split_modifiers(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(".")))


def _make_instruction(match: re.Match[str], line: int | None, labels: dict[str, int]) -> SassInstruction:
    address, predicate, opcode, modifiers, operands = match.groups()
    label = _BRANCH_TARGET.search(operands)
    target = labels.get(label[1]) if label else None
    return SassInstruction(
        int(address, 16), predicate or "", opcode, _split_modifiers(modifiers), operands, target, line
    )
