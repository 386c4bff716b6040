"""Depthwise convolutions with large filters as products with band matrices, by mma.sync.

For a channel and a row of the filter, a row of Y is a row of X times a band matrix: element (column of X, column of Y)
is the tap at their distance, or zero. The rows of the product are 16 rows of Y, and its reduction runs over the columns
of X. Some products are with zeros, but mma.sync takes as long for 2,048 of them as the FMA units for 64. The gradient
of the input is the convolution of dY, as X, with the flipped filter.

A CTA computes a tile of rows and columns of some images, a warp for each channel. X and the filters are rearranged in
shared memory as planes of channels. Two copies of each filter row, one of them shifted by one tap, have all pairs of
neighbouring taps in aligned words, which are in turn those of the copies. Such words are the fragments of the band
matrix. Fragments of the same distance from the diagonal are the same, so that a lane loads few words for each row of
the filter. Rows of zeros between images take the place of the padding, unless they are many.

With 16 images in a CTA, the rows of a product are images, and not rows of Y. Each row of X is then read once for all
rows of the filter, and rows of Y take the place of rows of X in shared memory.

With channels last, a thread loads eight channels of two neighbouring pixels and exchanges them; results are exchanged
likewise, as pairs of rounded results, or in float32 if the epilogue adds other tensors. With channels first, rows are
copied in vectors that divide the width, of which the window of a tile starts at a multiple, and pairs of results are
stored from registers.

An infinite element of X makes those of its tile NaN that the filter does not reach, as it is multiplied by zeros.

Source: PTX ISA, "mma.sync" and "ldmatrix".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.target import WARP_SIZE
from tvmconv.workloads.conv_gradient import InputGradient

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_call,
    emit_ptx,
    fill_zeros,
    if_,
    load_global,
    logical_and,
    serial_loop,
    store,
    store_global,
    store_shared,
    to_uint32,
)
from ..gemm.atoms import MmaSyncAtom, ldmatrix_x4
from ..gemm.cta import allocate_smem, allow_dependent_launch, open_cta
from ..gemm.epilogue_ops import EpilogueOps, apply_to_pixels, apply_to_vector
from .band_config import (
    COPIES,
    MAX_VECTOR,
    MMA_K,
    MMA_M,
    MMA_N,
    OCTET,
    OCTET_PAD_BYTES,
    STAGED_PAD,
    BandConfig,
)
from .batched_copies import BatchedCopies, CopyAction

ROW_GROUP, PAIR_GROUP = 8, 4  # rows and pairs of pixels that a warp copies at a time, which lie in distinct banks
FILTER_BATCH, PIXEL_BATCH, ROW_BATCH = 16, 4, 8  # loads of a thread that are under way at a time


class BandKernel:
    """Emitter of the kernel."""

    def __init__(self, config: BandConfig, arguments: dict[str, Buffer]) -> None:
        self.config, self.arguments, self.conv = config, arguments, config.convolution
        self.rows, self.columns = config.axes
        self.images, self.mmas_y, self.mmas_x = int(config.images), int(config.mmas_y), int(config.mmas_x)
        self.mmas_k, self.row_taps, self.pitch = int(config.mmas_k), int(config.row_taps), int(config.pitch_bytes)
        self.window, self.filter_bytes = int(self.rows.window), int(config.filter_bytes)
        self.channels, self.octets = int(config.channels), int(config.octets)
        self.zeros = self.channels * self.filter_bytes  # offset of the row of zeros in shared memory
        self.plane_bytes, self.zero_rows = int(config.plane_bytes), int(config.zero_rows)
        self.image_rows = self.window + self.zero_rows
        self.image_bytes = self.image_rows * self.pitch + int(config.image_pad)
        self.ops = EpilogueOps.from_workload(self.conv)

    def emit(self) -> None:
        """Emit the kernel."""
        config, num_parts, arguments = self.config, self.conv.C // self.channels, self.arguments
        with open_cta(int(config.num_blocks), int(config.num_threads), 1, splits_in_cluster=False) as cta:
            allow_dependent_launch()
            self.smem, self.position = allocate_smem(int(config.smem_bytes)), cta.thread
            self.channel = Register("channel", value=cta.index % num_parts * self.channels).value
            tile, tiles_x, tiles_y = cta.index // num_parts, int(self.columns.tiles), int(self.rows.tiles)
            self.tile_x, self.tile_y = tile % tiles_x, tile // tiles_x % tiles_y
            self.image = tile // (tiles_x * tiles_y) * self.images
            copies = self.plan_filter_copies()
            copies.load_first()
            self.clear_filters()
            self.copy_pixels()
            emit_call(T.cuda.cta_sync())
            copies.finish()
            emit_call(T.cuda.cta_sync())
            self.sums = allocate("sums", int(config.num_accumulators), "float32")
            fill_zeros(self.sums, int(config.num_accumulators))
            self.ops = self.ops.bind_tensor_args(arguments, uses_registers=True)
            self.multiply()
            self.store_results()

    def copy_items(self, count: int, batch: int, load: CopyAction, put: CopyAction) -> None:
        """Let the threads load items, up to `batch` at a time, before they store them to shared memory."""
        self.plan_copies(count, batch, load, put).emit()

    def plan_copies(self, count: int, batch: int, load: CopyAction, put: CopyAction) -> BatchedCopies:
        """Return the copies of items by all threads, in batches of no more items than each thread has."""
        num_threads = int(self.config.num_threads)
        batch = min(batch, ceil_div(count, num_threads))
        return BatchedCopies(self.position.thread, num_threads, count, batch, load, put)

    def clear_filters(self) -> None:
        """Store zeros to the place of the filters, and to the row of zeros behind them."""
        zeros = [T.uint32(0)] * 4

        def put(_: int, item: Expr) -> None:
            emit_ptx("st.shared.v4.b32", self.smem + to_uint32(item * 16), *zeros)

        self.copy_items((self.zeros + self.pitch) // 16, 1, lambda i, item: None, put)

    def plan_filter_copies(self) -> BatchedCopies:
        """Return the copies of the taps of each filter row, flipped for a gradient, in the second copy one place
        earlier.
        """
        (height, width), is_flipped = self.conv.kernel, isinstance(self.config.w, InputGradient)
        loaded = allocate("taps", FILTER_BATCH, "uint16")
        before = MMA_N * self.mmas_x - 1 + int(self.columns.offset)  # zeros before the first tap

        def load(i: int, item: Expr) -> None:
            pointer = self.arguments["K"].access_ptr("r", offset=self.channel * (height * width) + item)
            emit_ptx("ld.global.nc.b16", loaded[i], pointer)

        def put(i: int, item: Expr) -> None:
            channel, row, column = item // (height * width), item // width % height, item % width
            if is_flipped:
                row, column = height - 1 - row, width - 1 - column
            place = Register("place", value=before + column).value  # TVM would divide by negative numbers
            first = channel * self.filter_bytes + row * (COPIES * 2 * self.row_taps)
            for copy in range(COPIES):
                offset = first + (place - copy) // 2 * 8 + copy * 4 + (place - copy) % 2 * 2
                with if_(logical_and(place >= copy, place < self.row_taps)):
                    emit_ptx("st.shared.b16", self.smem + to_uint32(offset), loaded[i])

        return self.plan_copies(self.channels * height * width, FILTER_BATCH, load, put)

    def plane_offset(self, channel: Expr) -> Expr:
        """Return the offset in shared memory of a channel's plane."""
        return self.zeros + self.pitch + channel * self.plane_bytes + channel // OCTET * OCTET_PAD_BYTES

    def line_offset(self, line: Expr) -> Expr:
        """Return the offset of a line in its plane."""
        pad = int(self.config.image_pad)
        return line * self.pitch + (line // self.image_rows * pad if pad else 0)

    def locate_line(self, line: Expr) -> tuple[Expr, Expr]:
        """Return the image and the row of X of a line of a plane; rows outside of the window are negative."""
        if not self.zero_rows:
            return self.image + line // self.window, self.rows.first(self.tile_y) + line % self.window
        place = line + self.window  # after an image's rows come those of zeros
        row = place % self.image_rows
        return self.image + place // self.image_rows - 1, T.Select(row < self.window, row, -1)

    def copy_pixels(self) -> None:
        """Store the window of X as planes of channels, two neighbouring pixels at a time, with zeros around it."""
        conv, pair_groups = self.conv, MMA_K // 2 * self.mmas_k // PAIR_GROUP
        (height, width), words = conv.input_size, allocate("pixels", PIXEL_BATCH * 2 * 4, "uint32")
        first_column, window_columns = self.columns.first(self.tile_x), int(self.columns.window)
        plane_rows, rows = int(self.config.plane_rows), max(1, ROW_GROUP // self.octets)

        def locate(item: Expr) -> tuple[Expr, Expr, Expr]:
            """Return pair, octet and line of an item; those of a warp lie in distinct banks."""
            low, octet, row = item % PAIR_GROUP, item // PAIR_GROUP % self.octets, item // (PAIR_GROUP * self.octets)
            group = row // rows
            return group % pair_groups * PAIR_GROUP + low, octet, group // pair_groups * rows + row % rows

        def load(i: int, item: Expr) -> None:
            pair, octet, line = locate(item)
            image, row = self.locate_line(line)
            for e in range(2):
                column = first_column + pair * 2 + e
                for word in range(4):
                    store(words, (i * 2 + e) * 4 + word, T.uint32(0))
                tests = (image < conv.N, row >= 0, row < height, column >= 0, column < width, line < plane_rows)
                with if_(logical_and(*tests, pair * 2 + e < window_columns)):
                    offset = ((image * height + row) * width + column) * conv.C + self.channel + octet * OCTET
                    registers = [words[(i * 2 + e) * 4 + word] for word in range(4)]
                    emit_ptx("ld.global.nc.v4.b32", *registers, self.arguments["X"].access_ptr("r", offset=offset))

        def put(i: int, item: Expr) -> None:
            pair, octet, line = locate(item)
            first = self.plane_offset(octet * OCTET) + self.line_offset(line) + pair * 4
            with if_(True if plane_rows % rows == 0 else line < plane_rows):
                for channel in range(OCTET):
                    left, right = (words[(i * 2 + e) * 4 + channel // 2] for e in range(2))
                    pair_word = merge_upper(left, right) if channel % 2 else merge_lower(left, right)
                    emit_ptx("st.shared.b32", self.smem + to_uint32(first + channel * self.plane_bytes), pair_word)

        count = ceil_div(plane_rows, rows) * rows * pair_groups * PAIR_GROUP * self.octets
        self.copy_items(count, PIXEL_BATCH, load, put)

    def has_taps(self, diagonal: int) -> bool:
        """Return whether a part of the band, of 16 × 8 elements at a distance from the diagonal, has taps."""
        nearest = MMA_N * diagonal - int(self.columns.offset)
        return any(column - MMA_N < self.columns.taps and column + MMA_N > 0 for column in (nearest, nearest + MMA_N))

    def find_places(self) -> dict[int, int]:
        """Return the places of the band's fragments in registers, by their distance from the diagonal."""
        diagonals = [2 * j - i for j in range(self.mmas_k) for i in range(self.mmas_x) if self.has_taps(2 * j - i)]
        return {d: i for i, d in enumerate(sorted({d + half for d in diagonals for half in range(2)}))}

    def locate_bands(self, places: dict[int, int]) -> Expr:
        """Return the address of this lane's word of the nearest fragment of the first row of the filter."""
        lane, warp = self.position.lane, self.position.warp
        copy = (lane // 4 + 1) % COPIES
        tap = lane % 4 * 2 - lane // 4 + MMA_N * self.mmas_x - 1 - copy + min(places) * MMA_N
        address = self.smem + to_uint32(warp * self.filter_bytes + tap * 4 + copy * 4)
        return Register("band_address", "uint32", address).value

    def load_bands(self, taps: Buffer, first: int, places: dict[int, int], bands: Expr, tap_row: Expr) -> None:
        """Load the fragments of a row of the filter, from a register of `taps` on."""
        for diagonal, place in places.items():
            distance = (diagonal - min(places)) * (MMA_N * COPIES * 2)
            offset = tap_row * (COPIES * 2 * self.row_taps) + distance
            emit_ptx("ld.shared.b32", taps[first + place], bands + to_uint32(offset))

    def multiply(self) -> None:
        """Multiply the rows of X of each row of the filter by its band matrix; a warp computes a channel."""
        lane, warp = self.position.lane, self.position.warp
        places = self.find_places()
        bands = self.locate_bands(places)
        address = self.smem + to_uint32(self.plane_offset(warp) + lane // 16 * 16)
        plane = Register("plane_address", "uint32", address).value
        taps = allocate("band", len(places), "uint32")
        pixels = allocate("rows", self.images * self.mmas_k * 4, "uint32")
        with serial_loop(self.rows.taps, "tap_row") as tap_row:
            self.load_bands(taps, 0, places, bands, tap_row)
            for mma_y in range(self.mmas_y):
                first = mma_y * MMA_M + tap_row + int(self.rows.offset)
                with if_(logical_and(first + MMA_M > 0, first < self.window)):
                    self.load_rows(pixels, plane, first)
                    self.multiply_rows(pixels, taps, places, mma_y)

    def load_rows(self, pixels: Buffer, plane: Expr, first: Expr) -> None:
        """Load the fragments of 16 rows of each image, with zeros in place of rows outside of the window."""
        row = first + self.position.lane % 16
        is_inside = logical_and(row >= 0, row < self.window)
        for image in range(self.images):
            place = self.zero_rows + image * self.image_rows + row
            line = plane + to_uint32(place * self.pitch)
            if self.config.reads_zero_row:
                line = T.Select(is_inside, line, self.smem + to_uint32(self.zeros))
            line = Register("row_address", "uint32", line).value
            for j in range(self.mmas_k):
                ldmatrix_x4(self.list_fragment(pixels, image, j), line + to_uint32(j * MMA_K * 2))

    def multiply_rows(self, pixels: Buffer, taps: Buffer, places: dict[int, int], mma_y: int) -> None:
        """Multiply the fragments of 16 rows of each image by the parts of the band matrix that have taps."""
        atom = MmaSyncAtom(self.config.w.dtype, self.config.w.dtype)
        for j, image, i in itertools.product(range(self.mmas_k), range(self.images), range(self.mmas_x)):
            if self.has_taps(2 * j - i):
                band = [taps[places[2 * j - i + half]] for half in range(2)]
                atom.emit(self.accumulators(image, mma_y, i), self.list_fragment(pixels, image, j), band)

    def list_fragment(self, pixels: Buffer, image: int, mma_k: int) -> list[Expr]:
        """Return the registers of a fragment of X."""
        return [pixels[(image * self.mmas_k + mma_k) * 4 + e] for e in range(4)]

    def accumulators(self, image: int, mma_y: int, mma_x: int) -> list[Expr]:
        """Return the accumulators of an instruction."""
        first = ((image * self.mmas_y + mma_y) * self.mmas_x + mma_x) * 4
        return [self.sums[first + e] for e in range(4)]

    @property
    def tile_rows(self) -> int:
        """Rows of Y of a tile."""
        return self.mmas_y * MMA_M

    @property
    def tile_columns(self) -> int:
        """Columns of Y of a tile."""
        return self.mmas_x * MMA_N

    def bind_channel(self, channel: Expr) -> Callable[[str], Expr]:
        """Load the arguments of the epilogue that a channel has, and return a function that reads them by name."""
        names = self.ops.channel_args
        values = {name: Register(name, "float32", self.arguments[name][channel]).value for name in names}
        return lambda name: values[name]

    def iterate_fragments(self) -> Iterator[tuple[list[Expr], Expr, Expr]]:
        """Yield two neighbouring sums of a lane, with their line, counted over all images, and column in the tile."""
        lane = self.position.lane
        for image, mma_y, mma_x in itertools.product(*map(range, (self.images, self.mmas_y, self.mmas_x))):
            sums = self.accumulators(image, mma_y, mma_x)
            for half in range(2):
                line = image * self.tile_rows + mma_y * MMA_M + half * 8 + lane // 4
                yield sums[2 * half : 2 * half + 2], line, mma_x * MMA_N + lane % 4 * 2

    def locate_output(self, line: Expr, column: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the image, the row and the column of Y at a place in the tile."""
        y = self.tile_y * self.tile_rows + line % self.tile_rows
        return self.image + line // self.tile_rows, y, self.tile_x * self.tile_columns + column

    def staged_address(self, channel: Expr, octet: Expr, line: Expr, word: Expr) -> Expr:
        """Return the address in shared memory of a word of the results of the CTA's tile."""
        pitch = int(self.config.staged_pitch)
        plane = self.images * self.tile_rows * pitch
        pad = OCTET_PAD_BYTES // 4 if self.config.stages_pairs else STAGED_PAD
        return self.smem + to_uint32((channel * plane + octet * pad + line * pitch + word) * 4)

    def store_results(self) -> None:
        """Exchange the results in shared memory, and store eight channels of a pixel at once."""
        emit_call(T.cuda.cta_sync())
        warp = self.position.warp
        if self.config.stages_pairs:
            packed, read = allocate("packed", 1, "uint32"), self.bind_channel(self.channel + warp)
            for sums, line, column in self.iterate_fragments():
                self.ops.pack(packed, 0, [self.ops.apply(value, read) for value in sums])
                emit_ptx("st.shared.b32", self.staged_address(warp, warp // OCTET, line, column // 2), packed[0])
        else:
            for sums, line, column in self.iterate_fragments():
                words = [T.reinterpret("uint32", value) for value in sums]
                emit_ptx("st.shared.v2.b32", self.staged_address(warp, warp // OCTET, line, column), *words)
        emit_call(T.cuda.cta_sync())
        if self.config.stages_pairs:
            self.store_pairs(self.images * self.tile_rows)
        else:
            self.store_pixels()

    def store_pairs(self, lines: int) -> None:
        """Store the rounded results of two neighbouring pixels per thread; the tile has a multiple of 8 lines."""
        height, width = self.conv.output_size
        words, packed = (allocate(name, OCTET, "uint32") for name in ("words", "octet"))
        pairs = self.tile_columns // 2
        rows = max(1, ROW_GROUP // self.octets)

        def put(_: int, item: Expr) -> None:
            low, octet, row = item % PAIR_GROUP, item // PAIR_GROUP % self.octets, item // (PAIR_GROUP * self.octets)
            group = row // rows
            pair = group % (pairs // PAIR_GROUP) * PAIR_GROUP + low
            line = group // (pairs // PAIR_GROUP) * rows + row % rows
            image, y, x = self.locate_output(line, pair * 2)
            with if_(logical_and(image < self.conv.N, y < height, x < width)):
                for e in range(OCTET):
                    emit_ptx("ld.shared.b32", words[e], self.staged_address(octet * OCTET + e, octet, line, pair))
                for e in range(2):
                    for word in range(OCTET // 2):
                        left, right = words[2 * word], words[2 * word + 1]
                        store(packed, e * 4 + word, merge_upper(left, right) if e else merge_lower(left, right))
                index = ((image * height + y) * width + x) * self.conv.O + self.channel + octet * OCTET
                for e in range(2):
                    registers = [packed[e * 4 + word] for word in range(4)]
                    with if_(True if not e or width % 2 == 0 else x + 1 < width):
                        pointer = self.arguments["Y"].access_ptr("w", offset=index + e * self.conv.O)
                        emit_ptx("st.global.v4.b32", pointer, *registers)

        self.copy_items(lines * pairs * self.octets, 1, lambda i, item: None, put)

    def store_pixels(self) -> None:
        """Apply the epilogue to float32 results, and store eight channels of a pixel per thread."""
        height, width = self.conv.output_size
        words, values, packed = (
            allocate(n, OCTET, d) for n, d in (("words", "uint32"), ("values", "float32"), ("packed", "uint32"))
        )

        def put(_: int, item: Expr) -> None:
            pixel, octet = item // (MMA_N * self.octets) * MMA_N + item % MMA_N, item // MMA_N % self.octets
            line, column = pixel // self.tile_columns, pixel % self.tile_columns
            image, y, x = self.locate_output(line, column)
            with if_(logical_and(image < self.conv.N, y < height, x < width)):
                for e in range(OCTET):
                    emit_ptx("ld.shared.b32", words[e], self.staged_address(octet * OCTET + e, octet, line, column))
                    store(values, e, T.reinterpret("float32", words[e]))
                channel = self.channel + octet * OCTET
                index = ((image * height + y) * width + x) * self.conv.O + channel
                apply_to_vector(self.ops, self.arguments, channel, index, OCTET, values, packed)
                store_global(self.arguments["Y"], index, packed, OCTET)

        count = self.images * self.tile_rows * self.tile_columns * self.octets
        self.copy_items(count, 1, lambda i, item: None, put)


class ChannelsFirstBandKernel(BandKernel):
    """Emitter of the kernel for arrays with channels first."""

    def copy_pixels(self) -> None:
        """Store the window of X in vectors along the rows, with zeros around it; each warp copies its own plane."""
        conv, width = self.conv, self.config.input_vector
        row_vectors, num_words = MMA_K * self.mmas_k // width, ceil_div(width, 2)
        batch = min(ROW_BATCH, self.images)
        words, one = (
            allocate(name, size, "uint32") for name, size in (("pixels", batch * num_words), ("vector", num_words))
        )
        (height, columns), warp = conv.input_size, self.position.warp
        plane = Register("plane_offset", value=self.plane_offset(warp)).value
        channels = (self.image * conv.C + self.channel + warp) * height * columns

        def put(address: Expr, first: int) -> None:
            for word in range(num_words):
                store(one, word, words[first * num_words + word] if first >= 0 else T.uint32(0))
            store_shared(self.smem + to_uint32(address), one, 2 * width)

        with self.open_positions(self.zero_rows * row_vectors) as position:  # before the first image
            put(plane + position // row_vectors * self.pitch + position % row_vectors * (2 * width), -1)
        with self.open_positions(self.image_rows * row_vectors) as position:
            line, vector = position // row_vectors, position % row_vectors
            row, column = self.rows.first(self.tile_y) + line, self.columns.first(self.tile_x) + vector * width
            tests = (row >= 0, row < height, column >= 0, column < columns)
            is_inside = Register("is_inside", value=logical_and(line < self.window, *tests).astype("int32")).value
            source = Register("source", value=channels + row * columns + column).value
            target = Register("target", value=plane + (self.zero_rows + line) * self.pitch + vector * (2 * width)).value
            for first in range(0, self.images, batch):
                for i in range(batch):
                    for word in range(num_words):
                        store(words, i * num_words + word, T.uint32(0))
                    has_image = True if conv.N % self.images == 0 else self.image + (first + i) < conv.N
                    with if_(logical_and(is_inside != 0, has_image)):
                        offset = source + (first + i) * (conv.C * height * columns)
                        load_global(one, self.arguments["X"], offset, width)
                        for word in range(num_words):
                            store(words, i * num_words + word, one[word])
                for i in range(batch):
                    put(target + (first + i) * self.image_bytes, i)

    @contextmanager
    def open_positions(self, count: int) -> Iterator[Expr]:
        """Open a loop of a warp over positions, which its lanes share."""
        with serial_loop(ceil_div(count, WARP_SIZE), "chunk") as chunk:
            position = Register("position", value=chunk * WARP_SIZE + self.position.lane).value
            with if_(True if count % WARP_SIZE == 0 else position < count):
                yield position

    def store_results(self) -> None:
        """Apply the epilogue to the sums of each lane, and store pairs of neighbouring results."""
        (height, width), vector = self.conv.output_size, math.gcd(self.conv.output_size[1], 2)
        channel = self.channel + self.position.warp
        values, packed = allocate("values", MAX_VECTOR, "float32"), allocate("packed", MAX_VECTOR, "uint32")
        read = None if self.ops.residuals else self.bind_channel(channel)
        for sums, line, first_column in self.iterate_fragments():
            for first in range(0, 2, vector):
                image, y, x = self.locate_output(line, first_column + first)
                with if_(logical_and(image < self.conv.N, y < height, x < width)):
                    index = ((image * self.conv.O + channel) * height + y) * width + x
                    if read:
                        results = [self.ops.apply(value, read) for value in sums[first : first + vector]]
                        self.ops.pack(packed, 0, results)
                    else:
                        for e in range(vector):
                            store(values, e, sums[first + e])
                        apply_to_pixels(self.ops, self.arguments, channel, index, vector, values, packed)
                    store_global(self.arguments["Y"], index, packed, vector)


def merge_lower(left: Expr, right: Expr) -> Expr:
    """Return the lower halves of two words as a word."""
    return left & T.uint32(0xFFFF) | T.shift_left(right, T.uint32(16))


def merge_upper(left: Expr, right: Expr) -> Expr:
    """Return the upper halves of two words as a word."""
    return T.shift_right(left, T.uint32(16)) | right & T.uint32(0xFFFF0000)
