"""The code in a cubin, which is an ELF file: what of two cubins has to be the same for them to run the same.

Source: System V Application Binary Interface, chapter 4, "Object Files", for 64 bits.
"""

from __future__ import annotations

import struct

from tvmconv.errors import CompileError

_CODE = b".text"
_SECTIONS_AT, _COUNTS_AT = 0x28, 0x3A  # in the file's header
_SECTION = struct.Struct("<IIQQQQIIQQ")


def code(image: bytes) -> dict[str, bytes]:
    """The machine code of a cubin, by section.

    Raises:
        CompileError: it is no ELF file of 64 bits.
    """
    try:
        if image[:5] != b"\x7fELF\x02":
            raise CompileError(f"the {len(image)} bytes given are no ELF file of 64 bits")
        (first,) = struct.unpack_from("<Q", image, _SECTIONS_AT)
        size, count, names = struct.unpack_from("<HHH", image, _COUNTS_AT)
        sections = [_SECTION.unpack_from(image, first + number * size) for number in range(count)]
    except (struct.error, IndexError) as error:
        raise CompileError(f"the {len(image)} bytes given are no whole ELF file: {error}") from error
    start = sections[names][4]
    found = {}
    for name, _, _, _, offset, length, *_ in sections:
        text = image[start + name : image.index(b"\0", start + name)]
        if text.startswith(_CODE):
            found[text.decode()] = image[offset : offset + length]
    return found
