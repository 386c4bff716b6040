"""Machine code sections of a cubin, which decide whether two cubins are equivalent.

A cubin is an ELF file. Source: System V Application Binary Interface, chapter 4, "Object Files", 64-bit format.
"""

from __future__ import annotations

import struct

from tvmconv.errors import CompileError

_CODE_SECTION_PREFIX = b".text"
_SECTION_TABLE_OFFSET, _SECTION_COUNTS_OFFSET = 0x28, 0x3A  # offsets in the ELF header
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")


def extract_code_sections(image: bytes) -> dict[str, bytes]:
    """Return the machine code of a cubin by section name.

    Raises:
        CompileError: The image is not a complete 64-bit ELF file.
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
