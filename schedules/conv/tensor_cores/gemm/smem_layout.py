"""Layout of a tile in shared memory, in the swizzle that TMA writes and wgmma reads.

Sources: PTX ISA, "Matrix Descriptor Format" and "Swizzling Modes"; CUTLASS, `include/cute/arch/mma_sm90_desc.hpp` and
`include/cute/atom/mma_traits_sm90_gmma.hpp`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Expr, Register, to_uint32
from .atoms import Major

SWIZZLE_ALIGNMENT_BYTES = 1024  # period of the 128-byte swizzle: 8 rows
MAX_SWIZZLE_BYTES = 128  # the widest swizzle
ADDRESS_MASK = (1 << 18) - 1  # 14 bits in units of 16 bytes
CHUNK_BYTES = 16  # unit that a swizzle permutes
_SWIZZLE_MODES = {128: 1, 64: 2, 32: 3}  # field of a matrix descriptor, by the width of the swizzle in bytes


@dataclass(frozen=True)
class SmemLayout:
    """A tile of `boxes` adjacent boxes, each of `rows` rows that are as wide as the swizzle.

    A box is a column of CuTe's 8-row swizzle atoms. The rows of a K-major operand are M or N, and its boxes follow one
    another along K. The rows of an MN-major operand are K, and its boxes follow one another along M or N. The swizzle
    is a function of the address, so a tile starts at a multiple of `SWIZZLE_ALIGNMENT_BYTES` (of 8 rows at least).
    """

    rows: int  # rows per box
    # Bytes per row, which is the width of the swizzle: 128, 64 or 32. Rows that neither TMA nor wgmma accesses may be
    # longer; their chunks are then permuted within 128 bytes.
    row_bytes: int
    boxes: int = 1  # number of boxes
    major: Major = Major.K  # contiguous mode of the operand
    is_swizzled: bool = True  # rows that are not swizzled have any multiple of 16 bytes

    @property
    def box_bytes(self) -> int:
        """Bytes per box."""
        return self.rows * self.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the tile."""
        return self.boxes * self.box_bytes

    def operand_offset(self, mn: int, k: int, itemsize: int) -> int:
        """Return the offset in bytes of the wgmma operand that starts at element (mn, k), without the swizzle."""
        row, column = (mn, k) if self.major is Major.K else (k, mn)
        box, column_bytes = divmod(column * itemsize, self.row_bytes)
        return box * self.box_bytes + row * self.row_bytes + column_bytes

    def swizzle_mask(self, row: Expr) -> Expr:
        """Return the number with which the index of a 16-byte chunk in a row is XORed."""
        if not self.is_swizzled:
            return 0
        rows_per_128_bytes = max(1, MAX_SWIZZLE_BYTES // self.row_bytes)
        return row // rows_per_128_bytes % (min(self.row_bytes, MAX_SWIZZLE_BYTES) // CHUNK_BYTES)

    def swizzled_offset(self, row: Expr, chunk: Expr) -> Expr:
        """Return the offset in bytes of a 16-byte chunk of a row in the first box."""
        return to_uint32(row * self.row_bytes) + to_uint32((chunk ^ self.swizzle_mask(row)) * CHUNK_BYTES)


class MatrixDescriptor:
    """The 64-bit matrix descriptor of a wgmma operand, whose tile moves through the stages of a pipeline.

    | bits | field, in units of 16 bytes | K-major operand | MN-major operand |
    | --- | --- | --- | --- |
    | 0-13 | start address | of the operand | of the operand |
    | 16-29 | leading byte offset | 1: unused by swizzled modes | next box along M or N |
    | 32-45 | stride byte offset | next 8 rows along M or N | next 8 rows along K |
    | 62-63 | swizzle mode | 1, 2, 3 for 128, 64, 32 bytes | the same |

    Args:
        name: Name of its register.
        layout: Layout of the tile.
        stride_bytes: Stride byte offset; 0 if the rows of the tile are neighbours.
    """

    def __init__(self, name: str, layout: SmemLayout, stride_bytes: int = 0) -> None:
        leading_bytes = CHUNK_BYTES if layout.major is Major.K else layout.box_bytes
        self._leading = leading_bytes // CHUNK_BYTES << 16
        self._reads_leading = layout.major is Major.MN
        self._high = (stride_bytes or 8 * layout.row_bytes) // CHUNK_BYTES | _SWIZZLE_MODES[layout.row_bytes] << 30
        self._low = Register(name, "uint32")

    def set_address(self, address: Expr) -> None:
        """Set the shared-memory address of the tile.

        Addresses in a cluster have the CTA's rank in their upper bits, which would change the leading byte offset.
        """
        if self._reads_leading:
            address = T.bitwise_and(address, T.uint32(ADDRESS_MASK))
        self._low.set(T.shift_right(address, T.uint32(4)) | T.uint32(self._leading))

    def encode_operand(self, offset_bytes: int) -> Expr:
        """Return the descriptor of the operand at an offset in the tile.

        The offset is added to the encoded address, as `cute::DescriptorIterator` does.
        """
        low = T.Cast("uint64", self._low.value + T.uint32(offset_bytes >> 4))
        return low | T.shift_left(T.Cast("uint64", T.uint32(self._high)), T.uint64(32))
