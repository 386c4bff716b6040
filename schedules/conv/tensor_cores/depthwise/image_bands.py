"""The products of `bands` with 16 images as their rows."""

from __future__ import annotations

import itertools
import math

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_call,
    emit_ptx,
    if_,
    load_shared,
    logical_and,
    store,
    store_global,
    to_uint32,
)
from ..gemm.atoms import MmaSyncAtom, ldmatrix_x4
from .band_config import MAX_VECTOR, MMA_K, MMA_N, BandConfig
from .bands import BandKernel, ChannelsFirstBandKernel


def emit_bands(config: BandConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel of a config; the arguments are those of its convolution."""
    kernels = {True: (BandKernel, ImageBandKernel), False: (ChannelsFirstBandKernel, ChannelsFirstImageBandKernel)}
    kernels[config.is_channels_last][bool(config.has_image_rows)](config, arguments).emit()


class ImageBandKernel(BandKernel):
    """Emitter of the kernel whose products have 16 images as rows, each at the same row of X.

    A row of X is read once for all taps, whose rows of Y are in registers until they are complete. Then they take the
    place of a row of X.
    """

    @property
    def computed_rows(self) -> int:
        """Rows of Y of a tile that are computed."""
        return min(self.tile_rows, self.rows.size) if self.rows.tiles == 1 else self.tile_rows

    def place_word(self, channel: Expr, image: Expr, row: Expr, column: Expr) -> Expr:
        """Return the address in shared memory of two neighbouring elements of a row."""
        offset = self.plane_offset(channel) + image * self.image_bytes + row * self.pitch + column * 2
        return self.smem + to_uint32(offset)

    def multiply(self) -> None:
        """Multiply each row of X by the band matrices of all rows of the filter."""
        lane, warp, atom = self.position.lane, self.position.warp, MmaSyncAtom(self.config.w.dtype, self.config.w.dtype)
        places, offset, num_taps = self.find_places(), int(self.rows.offset), self.rows.taps
        taps = allocate("band", num_taps * len(places), "uint32")
        bands = self.locate_bands(places)
        for tap_row in range(num_taps):
            self.load_bands(taps, tap_row * len(places), places, bands, tap_row)
        self.packed, self.read = allocate("packed", 1, "uint32"), self.bind_channel(self.channel + warp)
        pixels = allocate("rows", self.mmas_k * 4, "uint32")
        line = Register("line_address", "uint32", self.place_word(warp, lane % 16, 0, lane // 16 * 8)).value
        remaining = [*range(self.computed_rows)]
        for row in range(self.window):
            outputs = {tap: row - tap - offset for tap in range(num_taps)}
            outputs = {tap: output for tap, output in outputs.items() if 0 <= output < self.computed_rows}
            for j in range(self.mmas_k if outputs else 0):
                registers = [pixels[j * 4 + e] for e in range(4)]
                ldmatrix_x4(registers, line + to_uint32(row * self.pitch + j * MMA_K * 2))
            for tap, output in outputs.items():
                for j, i in itertools.product(range(self.mmas_k), range(self.mmas_x)):
                    if self.has_taps(2 * j - i):
                        fragment = [taps[tap * len(places) + places[2 * j - i + half]] for half in range(2)]
                        registers = [pixels[j * 4 + e] for e in range(4)]
                        atom.emit(self.accumulators(0, output % num_taps, i), registers, fragment)
            emit_call(T.cuda.warp_sync())
            while remaining and (row + 1 == self.window or remaining[0] + num_taps + offset <= row + 1):
                self.replace_row(remaining.pop(0))

    def accumulators(self, image: int, mma_y: int, mma_x: int) -> list[Expr]:
        """Return the accumulators of a row of Y, whose place in turn is `mma_y`."""
        return [self.sums[(mma_y * self.mmas_x + mma_x) * 4 + e] for e in range(4)]

    def replace_row(self, output: int) -> None:
        """Store the results of a row of Y in place of that row of X, and set its sums to zero for another one."""
        lane, warp = self.position.lane, self.position.warp
        for i in range(self.mmas_x):
            sums = self.accumulators(0, output % self.rows.taps, i)
            for half in range(2):
                self.ops.pack(self.packed, 0, [self.ops.apply(value, self.read) for value in sums[2 * half :][:2]])
                address = self.place_word(warp, half * 8 + lane // 4, output, i * MMA_N + lane % 4 * 2)
                emit_ptx("st.shared.b32", address, self.packed[0])
            first = (output % self.rows.taps * self.mmas_x + i) * 4
            for e in range(4):
                store(self.sums, first + e, T.float32(0))

    def locate_output(self, line: Expr, column: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the image, the row and the column of Y at a place in the tile, whose lines are computed rows."""
        y = self.tile_y * self.tile_rows + line % self.computed_rows
        return self.image + line // self.computed_rows, y, self.tile_x * self.tile_columns + column

    def staged_address(self, channel: Expr, octet: Expr, line: Expr, word: Expr) -> Expr:
        """Return the address in shared memory of a word of the results."""
        return self.place_word(channel, line // self.computed_rows, line % self.computed_rows, word * 2)

    def store_results(self) -> None:
        """Store eight channels of a pixel at once."""
        emit_call(T.cuda.cta_sync())
        self.store_pairs(self.images * self.computed_rows)


class ChannelsFirstImageBandKernel(ImageBandKernel, ChannelsFirstBandKernel):
    """Emitter of the kernel of images as rows for arrays with channels first."""

    def store_results(self) -> None:
        """Store vectors of the rows of the warp's channel."""
        emit_call(T.cuda.warp_sync())
        (height, width), vector = self.conv.output_size, math.gcd(self.conv.output_size[1], MAX_VECTOR)
        words, row_vectors = allocate("words", MAX_VECTOR // 2, "uint32"), self.tile_columns // vector
        warp, channel = self.position.warp, self.channel + self.position.warp
        with self.open_positions(self.computed_rows * row_vectors) as position:
            row, column = position // row_vectors, position % row_vectors * vector
            _, y, x = self.locate_output(row, column)
            with if_(logical_and(y < height, x < width)):
                source = Register("result_address", "uint32", self.place_word(warp, 0, row, column)).value
                index = ((self.image * self.conv.O + channel) * height + y) * width + x
                target = Register("result_index", value=index).value
                for image in range(self.images):
                    with if_(True if self.conv.N % self.images == 0 else self.image + image < self.conv.N):
                        load_shared(words, source + to_uint32(image * self.image_bytes), 2 * vector)
                        target_index = target + image * (self.conv.O * height * width)
                        store_global(self.arguments["Y"], target_index, words, vector)
