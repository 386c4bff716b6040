"""What becomes of the sums of `hopper`: stored by TMA, slab by slab, or added up over a cluster first."""

from __future__ import annotations

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.gpu import WARP
from tvmconv.workloads import epilogue

from ....program import (
    Expr,
    both,
    call,
    load_global,
    load_shared,
    pack,
    ptx,
    serial,
    store,
    store_global,
    uint,
    unpack,
    unrolled,
    when,
)
from ..outputs import finish, without_relu
from ..product import CHUNK, SUM_BYTES
from .block import Block
from .tiles import MEETING_M, MEETING_N, SLAB_BYTES
from .workload import WARPGROUP, WGMMA_M

STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
STORE = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group"


class Output(Block):
    """The end of a tile: the epilogue, and its way to memory."""

    # --- store ---

    def _hold_channels(self) -> None:
        """Ask for what the epilogue reads for each channel; it comes while the tile is multiplied."""
        t, p = self.t, self.p
        for name in self.of_channels:
            for i in range(ceil_div(t.block_n, WARPGROUP)):
                n = self.thread % WARPGROUP + i * WARPGROUP
                store(self.held[name], i, T.float32(0))
                with when(both(True if t.block_n % WARPGROUP == 0 else n < t.block_n, self._is_channel(self.at_n + n))):
                    load_global(self.words, self.arguments[name], self.of_group * p.n + self.at_n + n, 1)
                    store(self.held[name], i, T.reinterpret("float32", self.words[0]))

    def _is_channel(self, n: Expr) -> Expr:
        """Whether a channel is one of the group's, and not of the last tile's overhang."""
        return True if self.p.n % self.t.block_n == 0 and self.t.sharers_n == 1 else n < self.p.n

    def _share_channels(self) -> None:
        """Put what is read for each channel where all threads of the warpgroup find it."""
        t = self.t
        if not self.of_channels:
            return
        for name in self.of_channels:
            for i in range(ceil_div(t.block_n, WARPGROUP)):
                n = self.thread % WARPGROUP + i * WARPGROUP
                with when(True if t.block_n % WARPGROUP == 0 else n < t.block_n):
                    ptx("st.shared.b32", self._of_channel(name, n), self.held[name][i])
        self._warpgroup_sync()

    def _of_channel(self, name: str, n: Expr) -> Expr:
        """Where in shared memory the epilogue's number lies for a channel of the tile."""
        place = self.group * len(self.of_channels) + self.of_channels.index(name)
        return self.memory[0] + uint(self.bias_at) + uint((place * self.t.block_n + n) * SUM_BYTES)

    def _store(self) -> None:
        """Finish a tile and store it, slab by slab: while one is on its way, the next is put together."""
        t = self.t
        leader = self.thread % WARPGROUP == 0
        slabs = t.block_n // self.slab
        for i in range(t.rows):
            for j in range(slabs):
                buffer = self._buffer(self.out[0])
                if self.residual:
                    call(T.cuda.mbarrier_wait(self._come(self.group * self.buffers + self.out[0]), self.out[1]))
                else:
                    with when(leader):
                        ptx("cp.async.bulk.wait_group.read", self.buffers - 1)
                    self._warpgroup_sync()
                self._finish_slab(i, j, buffer)
                call(T.ptx.fence.proxy.async_.shared__cta())
                self._warpgroup_sync()
                with when(leader):
                    m = self.at_m + self.group * (t.rows * WGMMA_M) + i * WGMMA_M
                    ptx(STORE, self.output_map, self.at_n + j * self.slab, m, self.of_group, buffer)
                    call(T.ptx.cp.async_.bulk.commit_group())
                    if self.residual:
                        ptx("cp.async.bulk.wait_group.read", 0)
                        number = self.group * self.buffers + self.out[0]
                        ptx("mbarrier.arrive.shared.b64", self._gone(number), T.uint32(1))
                self._advance(self.out, self.buffers)

    def _buffer(self, number: Expr) -> Expr:
        """Where a buffer of this warpgroup lies."""
        place = self.group * self.buffers + number
        return self.memory[0] + uint(int(self.t.ring_bytes())) + uint(place * self.buffer_bytes)

    def _swizzled(self, row: Expr, chunk: Expr) -> Expr:
        """Where a chunk of a slab lies, against the buffer, as TMA has it."""
        line = SLAB_BYTES // self.slab_bytes  # rows that lie side by side in 128 bytes
        return uint(row * self.slab_bytes) + uint((chunk ^ (row // line % (self.slab_bytes // CHUNK))) * CHUNK)

    def _finish_slab(self, i: int, j: int, buffer: Expr) -> None:
        """Apply the epilogue to a slab of the sums, and put it into a buffer."""
        t = self.t
        warp_row = self.thread % WARPGROUP // WARP * 16
        first = i * (int(t.accumulators) // t.rows) + j * self.slab // 8 * 4
        if self.p.itemsize == 2:
            places = [  # each of 16 pixels × 16 channels of a warp
                buffer + self._swizzled(warp_row + self.lane % 16, q * 2 + self.lane // 16)
                for q in range(self.slab // 16)
            ]
            if self.residual:
                for q, at in enumerate(places):
                    ptx(LDMATRIX, *(self.read[q * 4 + e] for e in range(4)), at)
                ptx("bar.warp.sync", T.uint32(0xFFFFFFFF))
            for q, at in enumerate(places):
                for c in range(2):
                    n = j * self.slab + q * 16 + c * 8
                    given = self._read_channels(n)
                    for h in range(2):
                        sums = [self.sums[first + (q * 2 + c) * 4 + h * 2 + e] for e in range(2)]
                        added: list[Expr] = self._halves(self.read[q * 4 + c * 2 + h]) if self.residual else [None] * 2
                        self._finish_pair(sums, given, added, c * 2 + h)
                ptx(STMATRIX, at, *(self.words[e] for e in range(4)))
            return
        for q in range(self.slab // 8):  # 8 pixels × 8 channels of a warp, twice
            given = self._read_channels(j * self.slab + q * 8)
            for h in range(2):
                row, chunk = warp_row + self.lane // 4 + h * 8, q * 2 + self.lane % 4 // 2
                at = buffer + self._swizzled(row, chunk) + uint(self.lane % 2 * 8)
                added = [None] * 2
                if self.residual:
                    load_shared(self.read, at, 8)
                    added = [T.reinterpret("float32", self.read[e]) for e in range(2)]
                sums = [self.sums[first + q * 4 + h * 2 + e] for e in range(2)]
                self._finish_pair(sums, given, added, 0)
                ptx("st.shared.v2.b32", at, self.words[0], self.words[1])

    def _halves(self, word: Expr) -> list[Expr]:
        """Two neighbouring elements of 16 bits."""
        store(self.words, 7, word)
        return unpack([self.words[7]], 2, self.w.storage)

    def _read_channels(self, n: int) -> dict[str, list[Expr]]:
        """What the epilogue reads for the two channels of this thread, of 8 from one on."""
        given: dict[str, list[Expr]] = {}
        for place, name in enumerate(self.of_channels):
            at = self._of_channel(name, n + self.lane % 4 * 2)
            ptx("ld.shared.v2.b32", self.value[4 + place * 2], self.value[5 + place * 2], at)
            given[name] = [self.value[4 + place * 2 + e] for e in range(2)]
        return given

    def _finish_pair(self, sums: list[Expr], given: dict[str, list[Expr]], added: list[Expr], word: int) -> None:
        """Apply the epilogue to two neighbouring sums, and round them into registers."""
        operations, relu = without_relu(self.operations, self.w.storage)
        for e in range(2):
            read = {name: pair[e] for name, pair in given.items()}
            if self.residual:
                read[self.residual] = added[e]
            names = [operation.name for operation in operations]
            store(self.value, e, epilogue.compute(names, sums[e], read.__getitem__))
        pack(self.words, word, [self.value[e] for e in range(2)], self.w.storage, relu)

    def _fetch_residual(self) -> None:
        """Have a tile's residual copied, each slab as soon as its buffer has been stored."""
        t = self.t
        slabs = t.block_n // self.slab
        with unrolled(t.rows, "i") as i, unrolled(slabs, "j") as j:
            for group in range(t.warpgroups):
                number = group * self.buffers + self.out[0]
                call(T.cuda.mbarrier_wait(self._gone(number), self.out[1] ^ 1))
                full = self._come(number)
                ptx("mbarrier.arrive.expect_tx.shared.b64", full, T.uint32(WGMMA_M * self.slab_bytes))
                to = self.memory[0] + uint(int(t.ring_bytes())) + uint(number * self.buffer_bytes)
                m = self.at_m + (group * t.rows + i) * WGMMA_M
                at = (self.at_n + j * self.slab, m, self.of_group)
                self._copy(3, "", to, self.residual_map, at, full, (), None)
            self._advance(self.out, self.buffers)

    # --- meet ---

    def _meet(self) -> None:
        """Have the sums of all blocks of the cluster meet, each share of the pixels in one block, which stores it."""
        is_multiplier = self.thread < self.multipliers
        self._cluster_sync()  # all stages have been multiplied: sums may lie where they were
        with when(is_multiplier):
            self._lay_down()
        self._cluster_sync()
        with when(is_multiplier):
            self._add_up()

    def _cluster_sync(self) -> None:
        """Wait for all threads of the blocks that share a sum."""
        call(T.cuda.cluster_sync() if self.t.split_k > 1 else T.cuda.cta_sync())

    def _lay_down(self) -> None:
        """Put this thread's sums into the shared memory of those who add them up.

        Stores to other blocks are not waited for one by one, as loads from them would be.
        """
        t = self.t
        of_rows = int(t.accumulators) // t.rows
        first = self.group * (t.rows * WGMMA_M) + self.thread % WARPGROUP // WARP * 16 + self.lane // 4
        for i in range(t.rows):
            for h in range(2):
                row = first + (i * WGMMA_M + h * 8)
                at = self.memory[0] + self._of_sums(self.part, row % int(t.share_m), self.lane % 4 * 2)
                if t.split_k > 1:
                    ptx("mapa.shared::cluster.u32", self.remote[0], at, uint(row // int(t.share_m)))
                else:
                    store(self.remote, 0, at)
                for j in range(t.block_n // 8):
                    pair = [self.sums[i * of_rows + j * 4 + h * 2 + e] for e in range(2)]
                    to = self.remote[0] + self._of_sums(0, 0, j * 8)
                    ptx("st.shared::cluster.v2.b32" if t.split_k > 1 else "st.shared.v2.b32", to, *pair)

    def _of_sums(self, part: Expr, row: Expr, column: Expr) -> Expr:
        """Where a sum of a block's share lies that one of the parts has come to, in pieces of 4 pixels × 8 channels.

        Half a warp stores pairs of one piece at a time, and a quarter of a warp loads one in vectors of four: both are
        all banks, once.
        """
        t = self.t
        piece = (part * int(t.share_m) + row) // MEETING_M * (t.block_n // MEETING_N) + column // MEETING_N
        within = row % MEETING_M * MEETING_N + column % MEETING_N
        return uint((piece * (MEETING_M * MEETING_N) + within) * SUM_BYTES)

    def _add_up(self) -> None:
        """Add up the sums of this block's share of the pixels, finish them, and store them in vectors of channels."""
        t, p, w = self.t, self.p, self.w
        across, down, share = MEETING_N // self.vector, t.block_n // MEETING_N, int(t.share_m)  # of pieces
        vectors = share * t.block_n // self.vector
        with serial(ceil_div(vectors, self.multipliers), "i") as i:
            number = i * self.multipliers + self.thread
            piece = number // (across * MEETING_M)
            row = piece // down * MEETING_M + number // across % MEETING_M
            column = piece % down * MEETING_N + number % across * self.vector
            of_tile = self.part * share + row
            m, n = self.at_m + of_tile, self.at_n + column
            inside = both(
                True if vectors % self.multipliers == 0 else number < vectors,
                True if t.split_k * share == self.block_m else of_tile < self.block_m,
                True if p.m % self.block_m == 0 else m < p.m,
                True if p.n % t.block_n == 0 else n < p.n,
            )
            with when(inside):
                self._sum_up(row, column)
                o = self.of_group * p.n + n
                finish(w, self.arguments, self.operations, m, o, self.vector, self.value, self.words)
                store_global(self.arguments["Y"], m * w.O + o, self.words, self.vector)

    def _sum_up(self, row: Expr, column: Expr) -> None:
        """Load neighbouring sums of the share, and add up what the blocks of the cluster have of them."""
        for part in range(self.t.split_k):
            at = self.memory[0] + self._of_sums(part, row, column)
            load_shared(self.words if part else self.value, at, self.vector * SUM_BYTES)
            for e in range(self.vector if part else 0):
                store(self.value, e, self.value[e] + T.reinterpret("float32", self.words[e]))
