"""Machine code, instruction by instruction, and the line of the CUDA text that each is of.

The lines are those that NVRTC writes down with `-lineinfo`, which leaves the instructions as they are, and nvdisasm
prints. What is of a function that the compiler put in place of its call counts for the line of the call.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from tvmconv.compiler import nvrtc, sass
from tvmconv.compiler.elf import code

ATTEMPTS = 5

# `        /*0a10*/              @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;`
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*(.*?)\s*;")
_LABEL = re.compile(r"(\.[\w.$]+):")
_SECTION = ".text."
_LINE = re.compile(r'//## File "[^"]*?([^"/]+)", line (\d+)')
_TARGET = re.compile(r"`\((\.\w+)\)")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: in bytes, from the kernel's begin.
        predicate: on which it is executed, such as `@!P0`; empty where it always is.
        opcode: such as `LDG`.
        modifiers: of the opcode, such as `E` and `128`.
        operands: their text.
        target: the address that its label stands for; None for one without any.
        line: of the CUDA text, from 1 on; None where it is of none.
    """

    address: int
    predicate: str
    opcode: str
    modifiers: tuple[str, ...]
    operands: str
    target: int | None = None
    line: int | None = None

    @property
    def name(self) -> str:
        """The opcode with its modifiers."""
        return ".".join((self.opcode, *self.modifiers))

    @property
    def text(self) -> str:
        """As it is written."""
        return " ".join(filter(None, (self.predicate, self.name, self.operands)))


Listing = tuple[Instruction, ...]


def disassembly(source: str, arch: str, cubin: nvrtc.Cubin) -> str:
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
    lined = cubin
    if not cubin.lines:
        wanted = code(cubin.image)
        for _ in range(ATTEMPTS):
            lined = nvrtc.compile_cubin(source, arch, lines=True)
            if code(lined.image) == wanted:
                break
    return sass.disassemble(lined.image, lines=True)


def parse(text: str) -> dict[str, Listing]:
    """The instructions of each kernel in a disassembly, by its name."""
    found: dict[str, list[tuple[re.Match[str], int | None]]] = {}
    labels: dict[str, dict[str, int]] = {}
    waiting: list[str] = []  # labels of what comes next
    name, line = "", None
    for each in text.splitlines():
        if match := _INSTRUCTION.match(each):
            address = int(match[1], 16)
            labels.setdefault(name, {}).update(dict.fromkeys(waiting, address))
            waiting.clear()
            found.setdefault(name, []).append((match, line))
        elif match := _LABEL.match(each):
            if match[1].startswith(_SECTION):
                name, line = match[1].removeprefix(_SECTION), None
            waiting.append(match[1])
        elif match := _LINE.search(each):
            *_, (file, number) = _LINE.findall(each.replace("inlined at ", "//## File "))
            line = int(number) if file == nvrtc.FILE else None
    return {
        name: tuple(_instruction(match, line, labels[name]) for match, line in matches)
        for name, matches in found.items()
    }


@functools.cache
def _modifiers(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(".")))


def _instruction(match: re.Match[str], line: int | None, labels: dict[str, int]) -> Instruction:
    address, predicate, opcode, modifiers, operands = match.groups()
    label = _TARGET.search(operands)
    target = labels.get(label[1]) if label else None
    return Instruction(int(address, 16), predicate or "", opcode, _modifiers(modifiers), operands, target, line)
