"""How `mma_sync` multiplies: steps in a ring of shared memory, fragments one mma ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads import epilogue

from ....program import Expr, both, call, ptx, serial, store, uint, unrolled, when, zeros
from ..outputs import read_argument
from ..product import CHUNK, SUM_BYTES
from .copies import Copies
from .tiles import MMA_M, MMA_N

MMA = {
    "float16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "bfloat16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "tf32": "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
}
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"


class Products(Copies):
    """The sums of a tile, by mma: each step is multiplied while later ones are copied."""

    def _begin(self) -> None:
        """Begin the sums: with a residual, where that is so, in one of the slices of the reduction, else with zero."""
        zeros(self.sums, self.mmas_m * self.mmas_n * 4)
        first = both(self._is_first_slice(), True if self.t.split_k == 1 else self.part == 0)
        width = math.gcd(self.p.n, 2)
        for operation in self.early:
            if operation.takes != "output":
                continue
            with (
                when(first),
                unrolled(self.mmas_n, "j") as j,
                unrolled(self.mmas_m, "i") as i,
                unrolled(2, "h") as h,
            ):
                m, n = self._pixel(i, h), self._channel(j)
                for pair in range(0, 2, width):
                    with when(self._is_output(m, n + pair)):
                        added = self._read(operation, m, n + pair, width)
                        self._add(operation, (i * self.mmas_n + j) * 4 + h * 2 + pair, added)

    def _add(self, operation: epilogue.Operation, first: Expr, added: Sequence[Expr]) -> None:
        """Apply an operation to neighbouring sums."""
        for e, value in enumerate(added):
            store(self.sums, first + e, operation.compute(self.sums[first + e], value))

    def _read(self, operation: epilogue.Operation, m: Expr, n: Expr, width: int) -> list[Expr]:
        """An operation's argument for neighbouring channels of a pixel, in the accumulation dtype."""
        return read_argument(self.w, self.arguments, operation, m, self.group * self.p.n + n, width, self.words)

    def _multiply(self, following: Expr, more: Expr) -> None:
        """Walk through the steps, each copied `stages` - 1 of them ahead, its fragments one mma ahead.

        Behind the last steps that are copied for this tile come the first ones of the following. What an mma waits for
        is asked for before what is wanted later: fragments before copies, and these spread over the mmas of a step, for
        the instructions to be issued while the tensor cores are at work.
        """
        t, ahead, last = self.t, self.t.stages - 1, self.mmas_k - 1

        def copy(step: Expr, part: Callable[[Expr, Expr], None]) -> None:
            with when(step + ahead < self.steps):
                part(step + ahead, self.slot[1])
            if t.tiles_per_block > 1:
                with when(both(step + ahead >= self.steps, more, self._is_tile(following))):
                    part(step + (ahead - self.steps), self.slot[1])

        def advance(which: int) -> None:
            store(self.slot, which, T.Select(self.slot[which] == t.stages - 1, 0, self.slot[which] + 1))

        with serial(self.steps, "step") as step:
            if t.tiles_per_block > 1:
                with when(both(step + ahead == self.steps, more, self._is_tile(following))):
                    self._find_rows(following)
            for mma in range(self.mmas_k):
                if mma == last:
                    advance(0)
                    self._wait()
                    self._fragments(self.slot[0], 0, 0)
                else:
                    self._fragments(self.slot[0], mma + 1, (mma + 1) % 2)
                if mma == 0:
                    copy(step, self._copy_input)
                if mma == min(1, last - 1):
                    copy(step, self._copy_filters)
                    call(T.ptx.cp.async_.commit_group())
                    advance(1)
                self._mma(mma % 2)

    def _wait(self) -> None:
        """Wait for the next step, and for all warps to have read the last one."""
        call(T.ptx.cp.async_.wait_group(self.t.stages - 2))
        call(T.cuda.cta_sync())

    def _fragments(self, slot: Expr, mma: int, into: int) -> None:
        """Read this warp's operands of an mma of a step into one of two sets of registers.

        An `ldmatrix` of four matrices reads 16 rows × 32 bytes: of the input in the order of mma's registers, of the
        weight two mmas' operands.
        """
        lane, first = self.lane, (self.warp_k * self.mmas_k + mma) * 2
        stage = self.memory[0] + uint(slot * self.stage_bytes)
        row, chunk = self.warp_m * (self.mmas_m * MMA_M) + lane % 16, first + lane // 16
        at = stage + uint(row * self.row_bytes) + uint((chunk ^ self._swizzle(lane % 8)) * CHUNK)
        with unrolled(self.mmas_m, "i") as i:
            registers = [self.a[(into * self.mmas_m + i) * 4 + e] for e in range(4)]
            ptx(LDMATRIX, *registers, at + uint(i * (MMA_M * self.row_bytes)))
        row, chunk = self.warp_n * (self.mmas_n * MMA_N) + lane % 8 + lane // 16 * 8, first + lane // 8 % 2
        at = stage + uint(self.t.block_m * self.row_bytes) + uint(row * self.row_bytes)
        at = at + uint((chunk ^ self._swizzle(lane % 8)) * CHUNK)
        with unrolled(self.mmas_n // 2, "j") as j:
            registers = [self.b[(into * self.mmas_n + j * 2) * 2 + e] for e in range(4)]
            ptx(LDMATRIX, *registers, at + uint(j * (2 * MMA_N * self.row_bytes)))

    def _mma(self, of: int) -> None:
        """Multiply what is in one of the two sets of registers."""
        with unrolled(self.mmas_m, "i") as i, unrolled(self.mmas_n, "j") as j:
            sums = [self.sums[(i * self.mmas_n + j) * 4 + e] for e in range(4)]
            a = [self.a[(of * self.mmas_m + i) * 4 + e] for e in range(4)]
            b = [self.b[(of * self.mmas_n + j) * 2 + e] for e in range(2)]
            ptx(MMA[self.w.dtype], *sums, *a, *b, *sums)

    def _add_up_warps(self) -> None:
        """Add what the warps along the reduction have, through shared memory, in the first of them."""
        count, threads = self.mmas_m * self.mmas_n * 4, self.t.threads // self.t.warps_k
        mine = self.memory[0] + uint(self.thread % threads * SUM_BYTES)
        with when(self.warp_k > 0), unrolled(count, "i") as i:
            at = mine + uint((self.warp_k - 1) * (threads * count * SUM_BYTES))
            ptx("st.shared.b32", at + uint(i * (threads * SUM_BYTES)), self.sums[i])
        call(T.cuda.cta_sync())
        with when(self.warp_k == 0), unrolled(self.t.warps_k - 1, "g") as g, unrolled(count, "i") as i:
            ptx("ld.shared.b32", self.value[0], mine + uint((g * count + i) * (threads * SUM_BYTES)))
            store(self.sums, i, self.sums[i] + self.value[0])
        call(T.cuda.cta_sync())
