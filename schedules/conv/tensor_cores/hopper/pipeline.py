"""The kernel of `hopper`: a warp that copies, warpgroups that multiply and store, and a warp for a residual."""

from __future__ import annotations

from contextlib import ExitStack

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.gpu import WARP

from ....program import both, call, ptx, when
from .multiply import Multiplier
from .output import Output
from .produce import Producer
from .workload import WARPGROUP


class Pipeline(Producer, Multiplier, Output):
    """The kernel: who does what."""

    def write(self) -> None:
        """Emit the kernel."""
        t = self.t
        self._map()
        with ExitStack() as axes:
            self._bind(axes)
            self._allocate()
            self._begin()
            warp = self.thread // WARP
            with when(warp < self.multipliers // WARP):
                self._each_tile(self._multiply_and_store)
                if not self.meets:
                    with when(self.thread % WARPGROUP == 0):  # what is stored has been read; it arrives by itself
                        ptx("cp.async.bulk.wait_group.read", 0)
            with when(both(warp == self.multipliers // WARP, self.lane == 0)):
                self._each_tile(self._produce)
            if self.residual:
                with when(both(warp == self.multipliers // WARP + 1, self.lane == 0)):
                    self._each_tile(self._fetch_residual)
            if self.meets:
                self._meet()
            elif t.sharers > 1:  # a block's shared memory is there until nobody hands anything to it
                call(T.cuda.cluster_sync())

    def _multiply_and_store(self) -> None:
        """What a warpgroup does with a tile."""
        self._hold_channels()
        self._multiply()
        if self.meets:
            return
        self._share_channels()
        self._store()
