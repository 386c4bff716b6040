"""How `hopper` multiplies: wgmma on operands where they lie, one step in the tensor cores while the next is begun."""

from __future__ import annotations

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....program import Expr, call, ptx, serial, store, uint, when
from .block import Block
from .workload import WARPGROUP, WGMMA_BYTES

OPERAND = {"float16": "f16", "bfloat16": "bf16", "tf32": "tf32"}
SWIZZLE = {128: 1, 64: 2, 32: 3}  # of a matrix descriptor, by bytes


class Multiplier(Block):
    """The warpgroups that multiply, each as soon as a stage is full."""

    def _multiply(self) -> None:
        """Multiply a tile's steps, each as soon as it is there; one is in the tensor cores while the next is begun."""
        t = self.t
        with serial(self._own_steps(), "step") as step:
            call(T.cuda.mbarrier_wait(self._full(self.slot[0]), self.slot[1]))
            self._wgmma(step)
            with when(step > 0):
                call(T.ptx.wgmma.wait_group.sync.aligned(1))
                self._release()
            self._advance(self.slot, t.stages)
        call(T.ptx.wgmma.wait_group.sync.aligned(0))
        self._release()

    def _wgmma(self, step: Expr) -> None:
        """Begin all multiplications of a step; the first of a tile forget what the sums were."""
        t, w, itemsize = self.t, self.w, self.p.itemsize
        of_rows = int(t.accumulators) // t.rows
        name = f"wgmma.mma_async.sync.aligned.m64n{t.block_n}k{WGMMA_BYTES // itemsize}.f32"
        name = f"{name}.{OPERAND[w.dtype]}.{OPERAND[w.dtype]}"
        signs = (1, 1) if itemsize == 4 else (1, 1, 0, 0)  # as they are, neither operand negated or transposed
        rows = self.group * (t.rows * self.segment_bytes)
        for which, at in enumerate((self._stage() + uint(rows), self._stage() + uint(self.input_bytes))):
            store(self.operand, which, T.shift_right(at, T.uint32(4)) | T.uint32(1 << 16))
        upper = (8 * self.panel_bytes >> 4) | SWIZZLE[self.panel_bytes] << 30  # 8 rows to the next 8, and the swizzle

        def descriptor(which: int, offset: int) -> Expr:
            low = T.Cast("uint64", self.operand[which] + T.uint32(offset >> 4))
            return low | T.shift_left(T.Cast("uint64", T.uint32(upper)), T.uint64(32))

        call(T.ptx.wgmma.fence.sync.aligned())
        for k in range(t.taps * t.row_bytes // WGMMA_BYTES):
            further, of_tap = divmod(k * WGMMA_BYTES, t.row_bytes)
            panel, within = divmod(of_tap, self.panel_bytes)
            away = further * w.dilation[-1] * self.panel_bytes if self.together else 0
            for i in range(t.rows):
                a = descriptor(0, panel * self.block_m * self.panel_bytes + i * self.segment_bytes + within + away)
                b = descriptor(1, (further * self.panels + panel) * t.block_n * self.panel_bytes + within)
                sums = [self.sums[i * of_rows + e] for e in range(of_rows)]
                ptx(name, *sums, a, b, True if k else step > 0, *signs)
        call(T.ptx.wgmma.commit_group.sync.aligned())

    def _release(self) -> None:
        """Tell all who copy into the stage before the next one that it is empty."""
        t = self.t
        stage = T.Select(self.slot[0] == 0, t.stages - 1, self.slot[0] - 1)
        me = self.thread % WARPGROUP
        if t.sharers == 1:
            with when(me == 0):
                ptx("mbarrier.arrive.shared.b64", self._empty(stage), T.uint32(1))
            return
        writers = [self._rank_of(m, True) for m in range(t.sharers_m)]
        writers += [self._rank_of(True, (self.rank_n + n) % t.sharers_n) for n in range(1, t.sharers_n)]
        for i, rank in enumerate(writers):
            with when(me == i):
                ptx("mapa.shared::cluster.u32", self.remote[0], self._empty(stage), uint(rank))
                call(T.ptx.mbarrier.arrive.shared__cluster.b64(self.remote[0]))
