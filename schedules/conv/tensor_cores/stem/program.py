"""The kernel of `stem`: persistent blocks that stage the lines of tiles to come while they compute one."""

from __future__ import annotations

from contextlib import ExitStack

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....program import call, serial, store
from .inputs import Inputs
from .outputs import Outputs
from .products import Products
from .weight import Weight


class Program(Inputs, Weight, Products, Outputs):
    """The kernel: its parts, in the order in which they run."""

    def write(self) -> None:
        """Emit the kernel."""
        with ExitStack() as axes:
            self._bind(axes)
            self._allocate()
            self._begin()
            with serial((int(self.tile.tiles) - self.block + self.grid - 1) // self.grid, "i") as i:
                self._wait_for_inputs()
                ahead = i + self.buffers - 1
                if self.buffers > 1:
                    self._stage_if_any(self._tile_number(ahead), ahead % self.buffers)
                self._begin_sums()
                self._multiply()
                self._go_on(i % self.buffers)
                self._finish(self._tile_number(i))

    def _begin(self) -> None:
        """What is done once a block: the first inputs are asked for, and meanwhile the weight is spread."""
        store(self.base, 0, T.cuda.cvta_generic_to_shared(self.shared.access_ptr("rw")))
        self._copy_weight()
        call(T.ptx.cp.async_.commit_group())
        for ahead in range(self.ahead):
            self._stage_if_any(self._tile_number(ahead), ahead)
        self._stage_arguments()
        call(T.ptx.cp.async_.wait_group(self.ahead if self.lines.asynchronous else 0))
        call(T.cuda.cta_sync())
        self._spread_weight()
        self._point_lanes()
        if self.tile.hold:
            call(T.cuda.cta_sync())
            for step in range(self.lines.steps):
                self._load_weight(step, step)
